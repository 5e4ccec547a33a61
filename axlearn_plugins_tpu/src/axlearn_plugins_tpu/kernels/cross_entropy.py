"""The output layer and its cross-entropy by tokamax's kernel for TPUs: logits exist a tile at a time, on the chip.

tokamax's loss knows no weights of positions. So the kernel is asked for the logarithm of each position's normalizer Z only, and in
the backward pass for the gradient by it: what it multiplies is exp(logit - log Z), which a log Z less by log c makes c times as
large. The logit of the target, its gradient, weights and z-loss are XLA's.

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
from axlearn_plugins_tpu.kernels.blocks import LANES, LOSS, LossBlocks, fitting
from axlearn_plugins_transformer.kernels.cross_entropy import WEIGHT_AXES, CrossEntropyOp
from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

POSITIONS = ("batch", "sequence")
_MODULE = "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
_NONE = -1
"""A target outside of the vocabulary: the kernel adds nothing for it."""


class _Mosaic:
    """Tiles of positions, width and vocabulary; the backward pass makes the logits again."""

    def supports(self, op: CrossEntropyOp, context: KernelContext) -> str | None:
        """From v5 on; whole lanes of both dimensions, a vocabulary that is not split, no soft cap."""
        if reason := tokamax.missing():
            return reason
        if context.target == "tpu-v4":
            return "tokamax has it for TPUs from v5 on, not for v4"
        if op.static.softcap is not None:
            return "it has no soft cap"
        shape = op.weight.shape
        for name, size in zip(("width", "vocabulary"), shape, strict=True):
            if size % LANES:
                return f"the {name} {size} is not a multiple of {LANES}"
        ways = parts_of(shape, (None, "activation_vocab"))[1]
        return None if ways == 1 else f"the vocabulary is split over {ways} devices"

    def __call__(self, op: CrossEntropyOp) -> tuple[jax.Array, jax.Array]:
        """(loss, cross-entropy). No weight may be negative: its gradient would be NaN."""
        options, kernel_selection = op.static, selection.in_force()
        blocks = LOSS.get(kernel_selection.target if kernel_selection else "", LOSS[""])
        # Laid out as it is kept, so that it is gathered after the cast.
        cast = constrain(constrain(op.weight.astype(options.dtype), *WEIGHT_AXES), None, "activation_vocab")
        run = per_device(
            functools.partial(_on_device, blocks=blocks),
            ((*POSITIONS, None), (None, "activation_vocab"), POSITIONS),
            (*POSITIONS, None),
        )
        log_z, at_target = jnp.moveaxis(run(op.hidden.astype(options.dtype), cast, op.targets.astype(jnp.int32)), -1, 0)
        weights = lax.stop_gradient(op.weights)
        entropy = jnp.sum((log_z - at_target) * weights)
        loss = entropy + options.z_loss * jnp.sum(log_z**2 * weights) if options.z_loss else entropy
        return loss, lax.stop_gradient(entropy)


MOSAIC = _Mosaic()


def _on_device(hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks) -> jax.Array:
    """float32 [B, S, 2]: log Z, and the logit of the target."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    outputs: Any = _logits(rows, weight, targets.reshape(-1), blocks)
    return jnp.stack(outputs, axis=-1).reshape(*targets.shape, 2)


def _sizes(blocks: LossBlocks, weight: jax.Array) -> dict[str, int]:
    width, vocabulary = weight.shape
    return {
        "b_block_size": blocks.rows,
        "h_block_size": fitting(width, blocks.width),
        "v_block_size": fitting(vocabulary, blocks.vocabulary * 2 // weight.dtype.itemsize),
    }


def _pad_rows(x: jax.Array, blocks: LossBlocks, value: float = 0) -> jax.Array:
    """With as many rows as whole blocks have."""
    return jnp.pad(x, ((0, -x.shape[0] % blocks.rows), *((0, 0),) * (x.ndim - 1)), constant_values=value)


@contextlib.contextmanager
def _split_evenly(pallas: Any, tiles: int) -> Iterator[None]:
    """While the backward kernel is traced: it runs on no more cores than its tiles of the vocabulary are split among.

    tokamax 0.0.14 splits them among as many as divide their number, and starts one kernel on every core: the others would read and
    write behind the end of the matrix. 0.0.12 has one for all.
    """
    if not hasattr(pallas, "TensorCoreMesh"):
        yield
        return
    cores = math.gcd(tiles, pallas.get_tpu_info().num_cores)
    with compat.kernel_cores(pallas, cores):
        yield


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logits(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks
) -> tuple[jax.Array, jax.Array]:
    """float32 ([T], [T]) of [T, D], [D, V] and int32 [T]."""
    rows = _pad_rows(hidden, blocks)
    nowhere = jnp.full(rows.shape[:1], _NONE, jnp.int32)
    with tokamax.kernels_of(_MODULE) as kernels:
        run = kernels.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu
        _, log_z = run(rows, nowhere, weight, **_sizes(blocks, weight))
    columns = jnp.take(weight, targets, axis=1, mode="clip")  # [D, T]
    at_target = jnp.einsum("td,dt->t", hidden, columns, preferred_element_type=jnp.float32)
    return log_z[: hidden.shape[0]], at_target


def _forward(hidden: jax.Array, weight: jax.Array, targets: jax.Array, blocks: LossBlocks) -> tuple[Any, Any]:
    outputs: Any = _logits(hidden, weight, targets, blocks)
    return outputs, (hidden, weight, targets, outputs[0])


def _backward(
    blocks: LossBlocks, residuals: Any, slopes: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    hidden, weight, targets, log_z = residuals
    by_log_z, by_target = slopes
    rows = _pad_rows(hidden, blocks)
    nowhere = jnp.full(rows.shape[:1], _NONE, jnp.int32)
    sign = jnp.where(jnp.sum(by_log_z) < 0, -1.0, 1.0)  # where the loss itself is taken away
    shifted = _pad_rows(log_z - jnp.log(sign * by_log_z), blocks, float("inf"))  # 0 times what is behind the last row
    sizes = _sizes(blocks, weight)
    tiles = weight.shape[1] // sizes["v_block_size"]
    with tokamax.kernels_of(_MODULE) as kernels, _split_evenly(kernels.pltpu, tiles):
        run = kernels.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu
        to_hidden, to_weight = run(sign, shifted, rows, nowhere, weight, **sizes)
    columns = jnp.take(weight, targets, axis=1, mode="clip").T.astype(jnp.float32)
    to_hidden = to_hidden[: hidden.shape[0]] + by_target[:, None] * columns
    to_columns = by_target[:, None] * hidden.astype(jnp.float32)
    to_weight = to_weight + jnp.zeros(weight.shape[::-1], jnp.float32).at[targets].add(to_columns, mode="clip").T
    return to_hidden.astype(hidden.dtype), to_weight.astype(weight.dtype), None


_logits.defvjp(_forward, _backward)
