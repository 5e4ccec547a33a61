"""The op `cross_entropy`: linear output layer and loss in one, without the logits of all positions.

B batch, S positions, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.kernels.op import Op, Shape
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.per_device import parts_of

WEIGHT_AXES = ("embed", "vocab")
LOGIT_BYTES = 2**28
"""Of the logits that a device holds at one time, where `Options.chunk` is None."""
LEAST_POSITIONS = 512
"""Of a device in such a chunk: with fewer, reading the output layer takes longer than multiplying by it."""


class Options(NamedTuple):
    """The static options of the op.

    Attributes:
        dtype: of the matrix products; logits and loss are float32.
        chunk: positions per row whose logits exist at one time; None: `LOGIT_BYTES` of them on a device.
        softcap: caps logits to (-softcap, softcap) by a tanh (Gemma 2).
        z_loss: weight of log(Z)^2, which keeps logits from drifting (Chowdhery et al., 2022).
        constrain: lays out logits [B, positions, V] on the mesh.
    """

    dtype: str = "float32"
    chunk: int | None = None
    softcap: float | None = None
    z_loss: float = 0.0
    constrain: Any = None


@attrs.frozen(eq=False)
class CrossEntropyOp(Op[tuple[jax.Array, jax.Array]]):
    """The weighted sum of the cross-entropy of `hidden @ weight` with `targets`.

    The results are (loss, cross-entropy), float32 scalars; the first includes the z-loss, the second has no gradient.

    Attributes:
        hidden: [B, S, D].
        weight: [D, V], the output layer.
        targets: int32 [B, S].
        weights: float32 [B, S]; for a mean they sum to 1.
        static: dtypes, chunking, soft cap and z-loss.
    """

    name = "cross_entropy"

    hidden: jax.Array
    weight: jax.Array
    targets: jax.Array
    weights: jax.Array
    static: Options = Options()

    def operands(self) -> Mapping[str, Any]:
        """Positions and output layer."""
        return {"hidden": self.hidden, "weight": self.weight}

    def options(self) -> Mapping[str, Any]:
        """Chunk, soft cap and z-loss."""
        return {"chunk": self.static.chunk, "softcap": self.static.softcap, "z_loss": self.static.z_loss}

    def flops(self) -> float:
        """One product."""
        return 2.0 * math.prod(self.hidden.shape) * self.weight.shape[1]

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """By the arrays [T, D] x [D, V] of a launch: one product forward, three backward.

        The body of the kernel has more of them, each for some steps of the grid.
        """
        rows, weight = (shape for shape in operands if len(shape) == 2)
        return 2.0 * rows[0] * math.prod(weight) * (3 if len(results[0]) > 1 else 1)

    def reference(self) -> tuple[jax.Array, jax.Array]:
        """Chunks of positions in a scan; differentiated three products, none twice.

        Each chunk adds its part to the gradient of the output layer, or where that takes less memory leaves the slopes of its
        logits, in the dtype of the products, for one product behind the scan.
        """
        return _loss(self.hidden, self.weight, self.targets, self.weights, self.static)


def logits_of(hidden: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """float32 [B, S, V]: what the loss is over."""
    logits = lax.dot_general(
        hidden.astype(options.dtype),
        weight.astype(options.dtype),
        (((2,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    logits = options.constrain(logits) if options.constrain else logits
    return logits if options.softcap is None else options.softcap * jnp.tanh(logits / options.softcap)


class _Chunk(NamedTuple):
    """Some positions of all rows."""

    hidden: jax.Array  # [B, C, D]
    targets: jax.Array  # [B, C]
    weights: jax.Array  # [B, C]


def chunk_positions(rows: int, vocabulary: int) -> int:
    """Positions per row whose logits take `LOGIT_BYTES` on a device.

    Args:
        rows: of the whole batch.
        vocabulary: of the whole output layer.
    """
    row_parts, vocabulary_parts = parts_of((rows, vocabulary), ("batch", "activation_vocab"))
    device_rows, device_vocabulary = rows / row_parts, vocabulary / vocabulary_parts
    positions = max(LOGIT_BYTES / (4 * device_vocabulary), LEAST_POSITIONS)
    return max(1, int(positions / device_rows))


def _padded(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[_Chunk, int]:
    """The positions padded with weight 0 to a whole number of chunks; and that number."""
    rows, length, _ = hidden.shape
    count = -(-length // (options.chunk or chunk_positions(rows, weight.shape[1])))
    size = -(-length // count)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)) if length % size else x

    return _Chunk(*map(pad, (hidden, targets, weights))), count


def _stacked(whole: _Chunk, count: int) -> _Chunk:
    """The chunks along a new leading axis."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0), whole)


def _values(logits: jax.Array, chunk: _Chunk, z_loss: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum of the loss, sum of the cross-entropy, log Z [B, C]) of a chunk."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, chunk.targets[..., None], axis=-1, mode="clip")[..., 0]
    entropy = jnp.sum((log_z - at_target) * chunk.weights)
    return (entropy + z_loss * jnp.sum(log_z**2 * chunk.weights) if z_loss else entropy), entropy, log_z


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    whole, count = _padded(hidden, weight, targets, weights, options)
    cast = weight.astype(options.dtype)

    def step(total: tuple[jax.Array, ...], chunk: _Chunk) -> tuple[tuple[jax.Array, ...], None]:
        values = _values(logits_of(chunk.hidden, cast, options), chunk, options.z_loss)
        return (total[0] + values[0], total[1] + values[1]), None

    zeros = (jnp.zeros((), jnp.float32),) * 2
    if count == 1:
        return step(zeros, whole)[0]  # type: ignore[return-value]
    return lax.scan(step, zeros, _stacked(whole, count))[0]  # type: ignore[return-value]


def _slope(chunk: _Chunk, weight: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    """(loss, cross-entropy, d loss / d logits [B, C, V] in the dtype of the products) of a chunk."""
    logits = logits_of(chunk.hidden, weight, options)
    loss, entropy, log_z = _values(logits, chunk, options.z_loss)
    scale = chunk.weights * (1 + 2 * options.z_loss * log_z) if options.z_loss else chunk.weights
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    at_target = jnp.where(ids == chunk.targets[..., None], chunk.weights[..., None], 0.0)
    slope = jnp.exp(logits - log_z[..., None]) * scale[..., None] - at_target
    if options.softcap is not None:
        slope = slope * (1 - (logits / options.softcap) ** 2)
    return loss, entropy, slope.astype(options.dtype)


def _to_hidden(slope: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """[..., V] x [D, V] -> [..., D]."""
    return lax.dot_general(slope, weight, (((slope.ndim - 1,), (1,)), ((), ()))).astype(dtype)


def _to_weight(hidden: jax.Array, slope: jax.Array, options: Options) -> jax.Array:
    """[B, C, D] x [B, C, V] -> float32 [parts, D, V], for the rows of each device."""
    parts = parts_of(hidden.shape[:1], ("batch",))[0]
    rows, slopes = (x.reshape(parts, -1, *x.shape[1:]) for x in (hidden.astype(options.dtype), slope))
    product = lax.dot_general(rows, slopes, (((1, 2), (1, 2)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return constrain(product, "batch", None, "activation_vocab")


def _keeps_slopes(hidden: jax.Array, weight: jax.Array, options: Options) -> bool:
    """Whether the slopes of all logits take no more memory than a gradient of the output layer in float32.

    Not where the sequence is split: a chunk would be written across devices.
    """
    row_parts, parts = parts_of(hidden.shape[:2], ("batch", "sequence"))
    positions = math.prod(hidden.shape[:2]) // row_parts
    return parts == 1 and positions * jnp.dtype(options.dtype).itemsize <= 4 * weight.shape[0]


def _forward(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, options: Options
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    whole, count = _padded(hidden, weight, targets, weights, options)
    cast = weight.astype(options.dtype)
    # The weight is gathered before the loop, and each device sums the gradient of its rows: chunks send nothing of either.
    # First laid out as it is kept: otherwise XLA gathers it before the cast.
    cast = constrain(constrain(cast, *WEIGHT_AXES), None, "activation_vocab")
    by_slopes = count == 1 or _keeps_slopes(hidden, weight, options)
    losses, to_hidden, to_weight = (_scan_slopes if by_slopes else _scan_gradients)(whole, count, cast, options)
    to_hidden = to_hidden[:, : hidden.shape[1]]
    # Before the layers' backward pass: XLA would hold what each device has summed until after it. A tied output layer transposes
    # the gradient, too: XLA for CPU would turn the product around, into one that it cannot run in bfloat16.
    to_hidden, to_weight = lax.optimization_barrier((to_hidden, _sum_parts(to_weight, options)))
    return losses, (to_hidden, to_weight.astype(weight.dtype))


_Scanned = tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]
"""((loss, cross-entropy), d loss / d hidden [B, S, D], d loss / d weight [parts, D, V])."""


def _scan_gradients(whole: _Chunk, count: int, weight: jax.Array, options: Options) -> _Scanned:
    """Each chunk adds to the gradient of the weight in float32."""
    parts = parts_of(whole.hidden.shape[:1], ("batch",))[0]

    def step(total: tuple[jax.Array, ...], chunk: _Chunk) -> tuple[tuple[jax.Array, ...], jax.Array]:
        loss, entropy, slope = _slope(chunk, weight, options)
        to_weight = _to_weight(chunk.hidden, slope, options)
        to_hidden = _to_hidden(slope, weight, chunk.hidden.dtype)
        return (total[0] + loss, total[1] + entropy, total[2] + to_weight), to_hidden

    zero = jnp.zeros((), jnp.float32)
    zeros = constrain(jnp.zeros((parts, *weight.shape), jnp.float32), "batch", None, "activation_vocab")
    total, to_hidden = lax.scan(step, (zero, zero, zeros), _stacked(whole, count))
    return (total[0], total[1]), jnp.moveaxis(to_hidden, 0, 1).reshape(whole.hidden.shape), total[2]


def _scan_slopes(whole: _Chunk, count: int, weight: jax.Array, options: Options) -> _Scanned:
    """Each chunk leaves its slopes where its positions are; the gradients are one product each, behind the scan."""
    rows, length, _ = whole.hidden.shape
    size = length // count

    def step(total: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        chunk = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size, 1), whole)
        loss, entropy, slope = _slope(chunk, weight, options)
        slopes = lax.dynamic_update_slice_in_dim(total[2], slope, index * size, 1)
        return (total[0] + loss, total[1] + entropy, slopes), None

    if count == 1:
        loss, entropy, slopes = _slope(whole, weight, options)
    else:
        zero, zeros = jnp.zeros((), jnp.float32), jnp.zeros((rows, length, weight.shape[1]), options.dtype)
        zeros = options.constrain(zeros) if options.constrain else zeros
        (loss, entropy, slopes), _ = lax.scan(step, (zero, zero, zeros), jnp.arange(count))
    to_hidden = _to_hidden(slopes, weight, whole.hidden.dtype)
    return (loss, entropy), to_hidden, _to_weight(whole.hidden, slopes, options)


def _sum_parts(to_weight: jax.Array, options: Options) -> jax.Array:
    """The sum of the parts of [parts, D, V]: among devices in the dtype of the product, as other matrices' gradients are."""
    if to_weight.shape[0] == 1:
        return to_weight[0]
    to_weight = to_weight.astype(options.dtype)
    to_weight = lax.reduce(to_weight, jnp.zeros((), to_weight.dtype), lax.add, (0,))  # `jnp.sum` would send float32
    return constrain(to_weight, *WEIGHT_AXES)


def _backward(options: Options, gradients: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]) -> Any:
    to_hidden, to_weight = gradients
    scale = cotangents[0]
    return to_hidden * scale.astype(to_hidden.dtype), to_weight * scale.astype(to_weight.dtype), None, None


_loss.defvjp(_forward, _backward)
