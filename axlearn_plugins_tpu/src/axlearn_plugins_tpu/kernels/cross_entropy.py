"""The output layer and its cross-entropy, using tokamax's TPU kernel.

Only one tile of logits exists at a time, on the chip.

tokamax's loss does not support per-position weights. The kernel therefore computes only the log of each position's
normalizer Z and, in the backward pass, the gradient through log Z. The backward kernel multiplies by exp(logit - log Z);
subtracting log c from log Z scales that factor by c. XLA computes the target's logit, its gradient, weights and z-loss.

B rows, S positions, T = B * S, D width, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_tpu import compat
from axlearn_plugins_tpu.kernels import tokamax
from axlearn_plugins_tpu.kernels.blocks import LANES, LOSS, LossBlocks, largest_divisor
from axlearn_plugins_transformer.kernels.cross_entropy import WEIGHT_AXES, CrossEntropyOp
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device

POSITIONS = ("batch", "sequence")
_MODULE = "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
_NO_TARGET = -1
"""A target outside the vocabulary, for which the kernel adds nothing."""


class _Mosaic:
    """Kernel tiled over positions, width and vocabulary. The backward pass recomputes the logits."""

    def supports(self, op: CrossEntropyOp, context: KernelContext) -> str | None:
        """Support v5 and later, unsharded vocabularies, and dimensions that are multiples of `LANES`, but no soft cap."""
        if reason := tokamax.unavailable_reason():
            return reason
        if context.target == "tpu-v4":
            return "tokamax supports TPU v5 and later, not v4"
        if op.static.softcap is not None:
            return "it does not support a soft cap"
        shape = op.weight.shape
        for name, size in zip(("width", "vocabulary"), shape, strict=True):
            if size % LANES:
                return f"the {name} {size} is not a multiple of {LANES}"
        ways = count_shards(shape, (None, "activation_vocab"))[1]
        return None if ways == 1 else f"the vocabulary is split over {ways} devices"

    def __call__(self, op: CrossEntropyOp) -> tuple[jax.Array, jax.Array]:
        """Return (loss, cross-entropy). Weights must not be negative, or their gradients would be NaN."""
        options, kernel_selection = op.static, selection.get_active_selection()
        blocks = LOSS.get(kernel_selection.target if kernel_selection else "", LOSS[""])
        # Keep the stored layout during the cast, so that the gather moves the smaller dtype.
        cast = constrain(constrain(op.weight.astype(options.dtype), *WEIGHT_AXES), None, "activation_vocab")
        run = per_device(
            functools.partial(_logits_on_device, blocks=blocks),
            ((*POSITIONS, None), (None, "activation_vocab"), POSITIONS),
            (*POSITIONS, None),
        )
        log_z, target_logits = jnp.moveaxis(
            run(op.hidden.astype(options.dtype), cast, op.targets.astype(jnp.int32)), -1, 0
        )
        weights = lax.stop_gradient(op.weights)
        entropy = jnp.sum((log_z - target_logits) * weights)
        loss = entropy + options.z_loss * jnp.sum(log_z**2 * weights) if options.z_loss else entropy
        return loss, lax.stop_gradient(entropy)


MOSAIC = _Mosaic()


def _logits_on_device(hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks) -> jax.Array:
    """Return float32 [B, S, 2]: log Z, and the logit of the target."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    outputs: Any = _logits(rows, weight, targets.reshape(-1), blocks)
    return jnp.stack(outputs, axis=-1).reshape(*targets.shape, 2)


def _sizes(blocks: LossBlocks, weight: jax.Array) -> dict[str, int]:
    width, vocabulary = weight.shape
    return {
        "b_block_size": blocks.rows,
        "h_block_size": largest_divisor(width, blocks.width),
        "v_block_size": largest_divisor(vocabulary, blocks.vocabulary * 2 // weight.dtype.itemsize),
    }


def _pad_rows(x: jax.Array, blocks: LossBlocks, value: float = 0) -> jax.Array:
    """Pad the rows to whole blocks."""
    return jnp.pad(x, ((0, -x.shape[0] % blocks.rows), *((0, 0),) * (x.ndim - 1)), constant_values=value)


@contextlib.contextmanager
def _limit_cores(pallas: Any, tiles: int) -> Iterator[None]:
    """Limit the backward kernel to the cores that its vocabulary tiles are divided among, while it is traced.

    tokamax 0.0.14 distributes the tiles over a number of cores that divides the number of tiles, but starts the kernel on every
    core. The other cores would read and write past the end of the matrix. 0.0.12 uses one core.
    """
    if not hasattr(pallas, "TensorCoreMesh"):
        yield
        return
    cores = math.gcd(tiles, pallas.get_tpu_info().num_cores)
    with compat.use_kernel_cores(pallas, cores):
        yield


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logits(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks
) -> tuple[jax.Array, jax.Array]:
    """Return log Z and target logits, float32 ([T], [T]), from [T, D], [D, V] and int32 [T]."""
    rows = _pad_rows(hidden, blocks)
    no_targets = jnp.full(rows.shape[:1], _NO_TARGET, jnp.int32)
    with tokamax.use_kernels(_MODULE) as kernels:
        run = kernels.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu
        _, log_z = run(rows, no_targets, weight, **_sizes(blocks, weight))
    columns = jnp.take(weight, targets, axis=1, mode="clip")  # [D, T]
    target_logits = jnp.einsum("td,dt->t", hidden, columns, preferred_element_type=jnp.float32)
    return log_z[: hidden.shape[0]], target_logits


def _forward(hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks) -> tuple[Any, Any]:
    outputs: Any = _logits(hidden, weight, targets, blocks)
    return outputs, (hidden, weight, targets, outputs[0])


def _backward(
    blocks: LossBlocks, residuals: Any, slopes: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    hidden, weight, targets, log_z = residuals
    log_z_gradient, target_gradient = slopes
    rows = _pad_rows(hidden, blocks)
    no_targets = jnp.full(rows.shape[:1], _NO_TARGET, jnp.int32)
    sign = jnp.where(jnp.sum(log_z_gradient) < 0, -1.0, 1.0)  # negative if the loss is subtracted
    shifted = _pad_rows(log_z - jnp.log(sign * log_z_gradient), blocks, float("inf"))  # zeroes the padding rows
    sizes = _sizes(blocks, weight)
    tiles = weight.shape[1] // sizes["v_block_size"]
    with tokamax.use_kernels(_MODULE) as kernels, _limit_cores(kernels.pltpu, tiles):
        run = kernels.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu
        grad_hidden, grad_weight = run(sign, shifted, rows, no_targets, weight, **sizes)
    columns = jnp.take(weight, targets, axis=1, mode="clip").T.astype(jnp.float32)
    grad_hidden = grad_hidden[: hidden.shape[0]] + target_gradient[:, None] * columns
    grad_columns = target_gradient[:, None] * hidden.astype(jnp.float32)
    grad_weight = grad_weight + jnp.zeros(weight.shape[::-1], jnp.float32).at[targets].add(grad_columns, mode="clip").T
    return grad_hidden.astype(hidden.dtype), grad_weight.astype(weight.dtype), None


_logits.defvjp(_forward, _backward)
