"""The `grouped_matmul` op, using tokamax's kernels in Triton and Mosaic GPU, forward and backward.

XLA lacks an efficient GPU implementation; `jax.lax.ragged_dot` computes every group for all rows. tokamax prefers Mosaic to
Triton; here, Mosaic has the lower priority until it has been validated on a GPU. Mosaic reads matrices along the inner
dimension on Blackwell and along the outer dimension on Hopper, so Blackwell copies them in the forward pass and Hopper in
the backward pass. Triton computes the gradient of the matrices on Blackwell, and on Hopper if the number of rows is not a
multiple of 64.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import GROUPED_MOSAIC, grouped_blocks
from axlearn_plugins_gpu.kernels.mosaic import refusal, use_mosaic_target

if TYPE_CHECKING:  # a program imports this module only if it uses the op
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp

ROWS = 8
"""Required divisor of the number of rows for Mosaic's kernels; blocks start at multiples of it."""

OUTER_ROWS = 64
"""Required divisor for the kernel that sums over rows."""

MOST_PADDING = 1.5
"""The largest factor by which Triton's kernel pads a dimension. Without the kernel, XLA computes every group for all rows."""


class _Tokamax:
    """Base class for both kernels. A block's rows all belong to one group, so work is proportional to the number of rows."""

    mosaic: bool

    def supports(self, op: "GroupedMatmulOp", context: KernelContext) -> str | None:
        """Support 16-bit dtypes and dimensions that are multiples of the block sizes. Triton's kernel can pad them."""
        if reason := tokamax.unavailable_reason() or unknown_gpu(context.target):
            return reason
        if self.mosaic and (reason := refusal(context.target)):
            return reason
        if dtype := next((d for d in op.dtypes.values() if d not in ("bfloat16", "float16")), None):
            return f"it supports bfloat16 and float16, not {dtype}"
        return (_check_mosaic_shapes if self.mosaic else _check_triton_shapes)(op, context.target)

    def __call__(self, op: "GroupedMatmulOp") -> jax.Array:
        """Return the matmul results, [M, N]. The caller has already split the operands across devices."""
        kernel_selection: Any = selection.get_active_selection()  # not None: `supports` accepts only known GPUs
        return _product(op.lhs, op.rhs, op.sizes, kernel_selection.target, self.mosaic)


class _Mosaic(_Tokamax):
    """Mosaic GPU kernel; loads and matmuls are pipelined."""

    mosaic = True


class _Triton(_Tokamax):
    """Triton kernel; a few warps compute one block."""

    mosaic = False


MOSAIC, TRITON = _Mosaic(), _Triton()


def _check_triton_shapes(op: "GroupedMatmulOp", target: str) -> str | None:
    multiple = _triton_multiple(target)
    for size in op.rhs.shape[1:]:
        if _round_up(size, multiple) > MOST_PADDING * size:
            return f"the dimension {size} is not a multiple of {multiple}, and padding it would add more than half"
    return None


def _triton_multiple(target: str) -> int:
    blocks = grouped_blocks(target)
    return math.lcm(blocks.n, blocks.k)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_mosaic_shapes(op: "GroupedMatmulOp", target: str) -> str | None:
    blocks, rows = GROUPED_MOSAIC[CHIPS[target].capability], op.lhs.shape[0]
    if len(set(op.dtypes.values())) > 1:
        return f"it needs one dtype, got {', '.join(sorted(set(op.dtypes.values())))}"
    if rows % ROWS:
        return f"the number of rows, {rows}, is not a multiple of {ROWS}"
    groups, *sides = op.rhs.shape
    if blocks.groups is not None and groups > blocks.groups and not tokamax.LATER:
        return f"it supports up to {blocks.groups} groups on {target}, not {groups}"
    uneven = next((size for size in sides if size % blocks.multiple), None)
    return None if uneven is None else f"the dimension {uneven} is not a multiple of {blocks.multiple}"


def _run(dimensions: str, mosaic: bool, target: str, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = getattr(tokamax.module("ops.ragged_dot.base"), f"{dimensions}_DIM_NUMS")
    kernel, context = (_mosaic if mosaic else _triton)(target)
    padded_lhs, padded_rhs = (lhs, rhs) if mosaic else (_pad(x, _triton_multiple(target)) for x in (lhs, rhs))
    with context:
        result = kernel(padded_lhs, padded_rhs, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)
    sides = {
        "DEFAULT_RAGGED_DOT": (rhs.shape[-1],),
        "TRANS_RHS_RAGGED_DOT": (rhs.shape[1],),
        "RAGGED_CONTRACTING_DOT": (lhs.shape[1], rhs.shape[1]),
    }[dimensions]
    return result[..., *(slice(side) for side in sides)] if result.shape[-len(sides) :] != sides else result


def _pad(x: jax.Array, multiple: int) -> jax.Array:
    """Pad the dimensions of an operand with zeros, except the first, which has rows or groups."""
    widths = [(0, 0), *((0, _round_up(size, multiple) - size) for size in x.shape[1:])]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _triton(target: str) -> tuple[Any, Any]:
    kernels, blocks = tokamax.module("ops.ragged_dot.pallas_triton"), grouped_blocks(target)
    config = kernels.Config(
        block_m=blocks.m, block_n=blocks.n, block_k=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages
    )
    return kernels.PallasTritonRaggedDot(config=config), tokamax.use_target(target)


def _mosaic(target: str) -> tuple[Any, Any]:
    kernels, blocks = tokamax.module("ops.ragged_dot.pallas_mosaic_gpu"), GROUPED_MOSAIC[CHIPS[target].capability]
    config = kernels.Config(
        block_m=blocks.m,
        block_n=blocks.n,
        block_k=blocks.k,
        num_stages=blocks.stages,
        split_k=1,
        persistent=False,
        collective=blocks.pair,
    )
    return kernels.PallasMosaicGpuRaggedDot(config=config), use_mosaic_target(target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, target: str, mosaic: bool) -> jax.Array:
    return _run("DEFAULT_RAGGED_DOT", mosaic, target, lhs, rhs, sizes)


def _forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, target: str, mosaic: bool) -> tuple[jax.Array, Any]:
    return _product(lhs, rhs, sizes, target, mosaic), (lhs, rhs, sizes)


def _backward(target: str, mosaic: bool, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    outer = mosaic and GROUPED_MOSAIC[CHIPS[target].capability].outer and lhs.shape[0] % OUTER_ROWS == 0
    grad_lhs = _run("TRANS_RHS_RAGGED_DOT", mosaic, target, gradient, rhs, sizes)
    if outer:  # it multiplies the rows after the last group by 0, and they may be NaN; Triton's kernel skips them
        inside = (jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None]
        lhs, gradient = jnp.where(inside, lhs, 0), jnp.where(inside, gradient, 0)
    grad_rhs = _run("RAGGED_CONTRACTING_DOT", outer, target, lhs, gradient, sizes)
    return grad_lhs.astype(lhs.dtype), grad_rhs.astype(rhs.dtype), None


_product.defvjp(_forward, _backward)
