"""The `cross_entropy` op, which fuses the output layer and the loss.

It never materializes the logits of all positions.

B batch, S positions, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_core.kernels.op import Op, Shape
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.per_device import count_shards

WEIGHT_AXES = ("embed", "vocab")
LOGIT_BYTES = 2**28
"""Bytes of logits that a device holds in memory at a time if `Options.chunk` is None."""
MIN_POSITIONS = 512
"""Minimum number of positions per device in such a chunk. With fewer, reading the output layer dominates the time."""


class Options(NamedTuple):
    """Static options for the op.

    Attributes:
        dtype: Dtype of the matmuls. Logits and loss are float32.
        chunk: Positions per row whose logits exist at a time. None uses `LOGIT_BYTES` per device.
        softcap: Bound on the logits, applied with a tanh: (-softcap, softcap) (Gemma 2). None does not cap them.
        z_loss: Weight of log(Z)^2, which keeps logits from drifting (Chowdhery et al., 2022).
        constrain: Function that applies a sharding constraint to logits [B, positions, V], or None.
    """

    dtype: str = "float32"
    chunk: int | None = None
    softcap: float | None = None
    z_loss: float = 0.0
    constrain: Any = None


@attrs.frozen(eq=False)
class CrossEntropyOp(Op[tuple[jax.Array, jax.Array]]):
    """The weighted sum of the cross-entropy between `hidden @ weight` and `targets`.

    The results are (loss, cross-entropy), float32 scalars. The loss includes the z-loss; the cross-entropy has no gradient.

    Attributes:
        hidden: [B, S, D].
        weight: Weight of the output layer, [D, V].
        targets: int32 [B, S].
        weights: float32 [B, S]. For a mean, they sum to 1.
        static: Dtypes, chunk size, soft cap and z-loss.
    """

    name = "cross_entropy"

    hidden: jax.Array
    weight: jax.Array
    targets: jax.Array
    weights: jax.Array
    static: Options = Options()

    def operands(self) -> Mapping[str, Any]:
        """Return the hidden states and the output layer."""
        return {"hidden": self.hidden, "weight": self.weight}

    def options(self) -> Mapping[str, Any]:
        """Return chunk size, soft cap and z-loss."""
        return {"chunk": self.static.chunk, "softcap": self.static.softcap, "z_loss": self.static.z_loss}

    def flops(self) -> float:
        """Count one matmul."""
        return 2.0 * math.prod(self.hidden.shape) * self.weight.shape[1]

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Count the matmuls of a launch from its arrays, [T, D] x [D, V].

        The forward pass has one matmul, and the backward pass three. The kernel body contains more matmuls, each of which runs
        in some steps of the grid.
        """
        rows, weight = (shape for shape in operands if len(shape) == 2)
        return 2.0 * rows[0] * math.prod(weight) * (3 if len(results[0]) > 1 else 1)

    def sample(self, rng: np.random.Generator) -> Self:
        """Sample targets from the vocabulary, non-negative weights, and logits of moderate size."""
        op, (width, vocabulary) = super().sample(rng), self.weight.shape
        targets = rng.integers(0, vocabulary, self.targets.shape)
        weights = rng.random(self.weights.shape) / math.prod(self.weights.shape)
        return attrs.evolve(
            op,
            weight=op.weight * width**-0.5,
            targets=jnp.asarray(targets, self.targets.dtype),
            weights=jnp.asarray(weights, self.weights.dtype),
        )

    def reference(self) -> tuple[jax.Array, jax.Array]:
        """Scan over chunks of positions.

        The loss and its gradients take three matmuls, none of which is recomputed.

        The scan accumulates the gradient of the output layer. If it takes less memory, the scan instead saves the gradients of
        the logits in the dtype of the matmuls, and a single matmul after the scan computes the gradient of the output layer.
        """
        return _loss(self.hidden, self.weight, self.targets, self.weights, self.static)


def compute_logits(hidden: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """Compute the logits that the loss uses, float32 [B, S, V]."""
    logits = lax.dot_general(
        hidden.astype(options.dtype),
        weight.astype(options.dtype),
        (((2,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    logits = options.constrain(logits) if options.constrain else logits
    return logits if options.softcap is None else options.softcap * jnp.tanh(logits / options.softcap)


class _Chunk(NamedTuple):
    """A chunk of positions, in all rows."""

    hidden: jax.Array  # [B, C, D]
    targets: jax.Array  # [B, C]
    weights: jax.Array  # [B, C]


def chunk_positions(rows: int, vocabulary: int) -> int:
    """Return the number of positions per row whose logits take `LOGIT_BYTES` on a device.

    Args:
        rows: Rows of the global batch.
        vocabulary: Size of the vocabulary.
    """
    row_parts, vocabulary_parts = count_shards((rows, vocabulary), ("batch", "activation_vocab"))
    device_rows, device_vocabulary = rows / row_parts, vocabulary / vocabulary_parts
    positions = max(LOGIT_BYTES / (4 * device_vocabulary), MIN_POSITIONS)
    return max(1, int(positions / device_rows))


def _pad_to_chunks(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[_Chunk, int]:
    """Pad the positions to a whole number of chunks. The padding has weight 0.

    Return the padded arrays and the number of chunks.
    """
    rows, length, _ = hidden.shape
    count = -(-length // (options.chunk or chunk_positions(rows, weight.shape[1])))
    size = -(-length // count)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)) if length % size else x

    return _Chunk(*map(pad, (hidden, targets, weights))), count


def _stack_chunks(padded: _Chunk, count: int) -> _Chunk:
    """Stack the chunks along a new leading axis."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0), padded)


def _chunk_losses(logits: jax.Array, chunk: _Chunk, z_loss: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss, the cross-entropy, and log Z [B, C] of a chunk.

    The losses are sums over the chunk.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, chunk.targets[..., None], axis=-1, mode="clip")[..., 0]
    entropy = jnp.sum((log_z - target_logits) * chunk.weights)
    return (entropy + z_loss * jnp.sum(log_z**2 * chunk.weights) if z_loss else entropy), entropy, log_z


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    padded, count = _pad_to_chunks(hidden, weight, targets, weights, options)
    cast = weight.astype(options.dtype)

    def step(total: tuple[jax.Array, ...], chunk: _Chunk) -> tuple[tuple[jax.Array, ...], None]:
        values = _chunk_losses(compute_logits(chunk.hidden, cast, options), chunk, options.z_loss)
        return (total[0] + values[0], total[1] + values[1]), None

    zeros = (jnp.zeros((), jnp.float32),) * 2
    if count == 1:
        return step(zeros, padded)[0]  # type: ignore[return-value]
    return lax.scan(step, zeros, _stack_chunks(padded, count))[0]  # type: ignore[return-value]


def _logit_grads(chunk: _Chunk, weight: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    """Return a chunk's loss, cross-entropy and logit gradients.

    The gradients are [B, C, V] in the dtype of the matmuls.
    """
    logits = compute_logits(chunk.hidden, weight, options)
    loss, entropy, log_z = _chunk_losses(logits, chunk, options.z_loss)
    scale = chunk.weights * (1 + 2 * options.z_loss * log_z) if options.z_loss else chunk.weights
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    target_logits = jnp.where(ids == chunk.targets[..., None], chunk.weights[..., None], 0.0)
    logit_grads = jnp.exp(logits - log_z[..., None]) * scale[..., None] - target_logits
    if options.softcap is not None:
        logit_grads = logit_grads * (1 - (logits / options.softcap) ** 2)
    return loss, entropy, logit_grads.astype(options.dtype)


def _hidden_grads(logit_grads: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """Compute the gradient of the hidden states: [..., V] x [D, V] -> [..., D]."""
    return lax.dot_general(logit_grads, weight, (((logit_grads.ndim - 1,), (1,)), ((), ()))).astype(dtype)


def _weight_grads(hidden: jax.Array, logit_grads: jax.Array, options: Options) -> jax.Array:
    """Compute the weight gradient from each device's rows.

    Maps [B, C, D] and [B, C, V] to float32 [parts, D, V].
    """
    parts = count_shards(hidden.shape[:1], ("batch",))[0]
    rows, logit_grads = (x.reshape(parts, -1, *x.shape[1:]) for x in (hidden.astype(options.dtype), logit_grads))
    product = lax.dot_general(rows, logit_grads, (((1, 2), (1, 2)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return constrain(product, "batch", None, "activation_vocab")


def _saves_logit_grads(hidden: jax.Array, weight: jax.Array, options: Options) -> bool:
    """Return whether saving the gradients of all logits takes less memory than accumulating the weight gradient.

    The accumulated gradient of the output layer is float32. Return False if the sequence is sharded, because writing
    a chunk would communicate across devices.
    """
    row_parts, parts = count_shards(hidden.shape[:2], ("batch", "sequence"))
    positions = math.prod(hidden.shape[:2]) // row_parts
    return parts == 1 and positions * jnp.dtype(options.dtype).itemsize <= 4 * weight.shape[0]


def _forward(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    padded, count = _pad_to_chunks(hidden, weight, targets, weights, options)
    cast = weight.astype(options.dtype)
    # Gather the weight before the loop, and sum the gradient on each device, so that a chunk needs no communication.
    # Constrain the weight to its stored sharding first; otherwise XLA gathers it before the cast.
    cast = constrain(constrain(cast, *WEIGHT_AXES), None, "activation_vocab")
    saves_logit_grads = count == 1 or _saves_logit_grads(hidden, weight, options)
    losses, hidden_grads, weight_grads = (_scan_logit_grads if saves_logit_grads else _scan_weight_grads)(
        padded, count, cast, options
    )
    hidden_grads = hidden_grads[:, : hidden.shape[1]]
    # Sum before the layers' backward pass; otherwise XLA keeps the per-device sums until after it. A tied output layer also
    # transposes the gradient: XLA on CPUs would swap the operands, and it cannot run that matmul in bfloat16.
    hidden_grads, weight_grads = lax.optimization_barrier((hidden_grads, _sum_parts(weight_grads, options)))
    return losses, (hidden_grads, weight_grads.astype(weight.dtype))


_Scanned = tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]
"""((loss, cross-entropy), d loss / d hidden [B, S, D], d loss / d weight [parts, D, V])."""


def _scan_weight_grads(padded: _Chunk, count: int, weight: jax.Array, options: Options) -> _Scanned:
    """Accumulate the weight gradient over chunks in float32."""
    parts = count_shards(padded.hidden.shape[:1], ("batch",))[0]

    def step(total: tuple[jax.Array, ...], chunk: _Chunk) -> tuple[tuple[jax.Array, ...], jax.Array]:
        loss, entropy, logit_grads = _logit_grads(chunk, weight, options)
        weight_grads = _weight_grads(chunk.hidden, logit_grads, options)
        hidden_grads = _hidden_grads(logit_grads, weight, chunk.hidden.dtype)
        return (total[0] + loss, total[1] + entropy, total[2] + weight_grads), hidden_grads

    zero = jnp.zeros((), jnp.float32)
    zeros = constrain(jnp.zeros((parts, *weight.shape), jnp.float32), "batch", None, "activation_vocab")
    total, hidden_grads = lax.scan(step, (zero, zero, zeros), _stack_chunks(padded, count))
    return (total[0], total[1]), jnp.moveaxis(hidden_grads, 0, 1).reshape(padded.hidden.shape), total[2]


def _scan_logit_grads(padded: _Chunk, count: int, weight: jax.Array, options: Options) -> _Scanned:
    """Save the gradients of all logits, then compute each gradient with one matmul."""
    rows, length, _ = padded.hidden.shape
    size = length // count

    def step(total: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        chunk = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size, 1), padded)
        loss, entropy, logit_grads = _logit_grads(chunk, weight, options)
        logit_grads = lax.dynamic_update_slice_in_dim(total[2], logit_grads, index * size, 1)
        return (total[0] + loss, total[1] + entropy, logit_grads), None

    if count == 1:
        loss, entropy, logit_grads = _logit_grads(padded, weight, options)
    else:
        zero, zeros = jnp.zeros((), jnp.float32), jnp.zeros((rows, length, weight.shape[1]), options.dtype)
        zeros = options.constrain(zeros) if options.constrain else zeros
        (loss, entropy, logit_grads), _ = lax.scan(step, (zero, zero, zeros), jnp.arange(count))
    hidden_grads = _hidden_grads(logit_grads, weight, padded.hidden.dtype)
    return (loss, entropy), hidden_grads, _weight_grads(padded.hidden, logit_grads, options)


def _sum_parts(weight_grads: jax.Array, options: Options) -> jax.Array:
    """Sum over the parts of [parts, D, V].

    Across devices, use the dtype of the matmul, as for other gradients.
    """
    if weight_grads.shape[0] == 1:
        return weight_grads[0]
    weight_grads = weight_grads.astype(options.dtype)
    weight_grads = lax.reduce(
        weight_grads, jnp.zeros((), weight_grads.dtype), lax.add, (0,)
    )  # `jnp.sum` would send float32
    return constrain(weight_grads, *WEIGHT_AXES)


def _backward(options: Options, gradients: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]) -> Any:
    hidden_grads, weight_grads = gradients
    scale = cotangents[0]
    return hidden_grads * scale.astype(hidden_grads.dtype), weight_grads * scale.astype(weight_grads.dtype), None, None


_loss.defvjp(_forward, _backward)
