"""The op `grouped_matmul` by tokamax's kernels in Triton and Mosaic GPU, forward and backward.

XLA has no code of its own for it on GPUs: `jax.lax.ragged_dot` computes every group for all rows there. tokamax takes Mosaic's
before Triton's where it can; here it is for configs that name it, until its numbers have been seen on a GPU. Mosaic's reads
matrices along the inner dimension on Blackwell and along the outer one on Hopper: a copy of them is made in the forward pass on the
one, in the backward pass on the other. The gradient by the matrices is Triton's on Blackwell, and on Hopper where the number of
rows is not a multiple of 64.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import GROUPED_MOSAIC, grouped
from axlearn_plugins_gpu.kernels.mosaic import compiling_for, refusal

if TYPE_CHECKING:  # only a program that has the op loads this module
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp

ROWS = 8
"""A multiple of which Mosaic's kernels take: blocks start at one."""

OUTER_ROWS = 64
"""The same where rows are summed over."""


class _Tokamax:
    """Blocks of rows of one group at a time, the work that of the rows."""

    mosaic: bool

    def supports(self, op: "GroupedMatmulOp", context: KernelContext) -> str | None:
        """16-bit numbers, dimensions that its blocks divide."""
        if reason := tokamax.missing() or unknown_gpu(context.target):
            return reason
        if self.mosaic and (reason := refusal(context.target)):
            return reason
        if dtype := next((d for d in op.dtypes.values() if d not in ("bfloat16", "float16")), None):
            return f"it takes bfloat16 and float16, not {dtype}"
        return (_mosaic_does_not_fit if self.mosaic else _triton_does_not_fit)(op, context.target)

    def __call__(self, op: "GroupedMatmulOp") -> jax.Array:
        """[M, N]. The caller has split everything among devices."""
        kernel_selection: Any = (
            selection.in_force()
        )  # where there is none, `supports` has said that the GPU is not known
        return _product(op.lhs, op.rhs, op.sizes, kernel_selection.target, self.mosaic)


class _Mosaic(_Tokamax):
    """A pipeline of loads and products."""

    mosaic = True


class _Triton(_Tokamax):
    """One block to a few warps."""

    mosaic = False


MOSAIC, TRITON = _Mosaic(), _Triton()


def _triton_does_not_fit(op: "GroupedMatmulOp", target: str) -> str | None:
    blocks = grouped(target)
    for size in op.rhs.shape[1:]:
        if size % blocks.n or size % blocks.k:
            return f"the dimension {size} is not a multiple of {max(blocks.n, blocks.k)}"
    return None


def _mosaic_does_not_fit(op: "GroupedMatmulOp", target: str) -> str | None:
    blocks, rows = GROUPED_MOSAIC[CHIPS[target].capability], op.lhs.shape[0]
    if len(set(op.dtypes.values())) > 1:
        return f"the dtypes are {', '.join(sorted(set(op.dtypes.values())))}; it takes one"
    if rows % ROWS:
        return f"the number of rows, {rows}, is not a multiple of {ROWS}"
    groups, *sides = op.rhs.shape
    if blocks.groups is not None and groups > blocks.groups and not tokamax.LATER:
        return f"it takes up to {blocks.groups} groups on {target}, not {groups}"
    uneven = next((size for size in sides if size % blocks.multiple), None)
    return None if uneven is None else f"the dimension {uneven} is not a multiple of {blocks.multiple}"


def _run(dimensions: str, mosaic: bool, target: str, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = getattr(tokamax.module("ops.ragged_dot.base"), f"{dimensions}_DIM_NUMS")
    kernel, context = (_mosaic if mosaic else _triton)(target)
    with context:
        return kernel(lhs, rhs, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)


def _triton(target: str) -> tuple[Any, Any]:
    kernels, blocks = tokamax.module("ops.ragged_dot.pallas_triton"), grouped(target)
    config = kernels.Config(
        block_m=blocks.m, block_n=blocks.n, block_k=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages
    )
    return kernels.PallasTritonRaggedDot(config=config), tokamax.for_target(target)


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
    return kernels.PallasMosaicGpuRaggedDot(config=config), compiling_for(target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, target: str, mosaic: bool) -> jax.Array:
    return _run("DEFAULT_RAGGED_DOT", mosaic, target, lhs, rhs, sizes)


def _forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, target: str, mosaic: bool) -> tuple[jax.Array, Any]:
    return _product(lhs, rhs, sizes, target, mosaic), (lhs, rhs, sizes)


def _backward(target: str, mosaic: bool, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    outer = mosaic and GROUPED_MOSAIC[CHIPS[target].capability].outer and lhs.shape[0] % OUTER_ROWS == 0
    to_lhs = _run("TRANS_RHS_RAGGED_DOT", mosaic, target, gradient, rhs, sizes)
    if outer:  # it multiplies rows behind the last group with 0, and they may be NaN; Triton's leaves them out
        inside = (jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None]
        lhs, gradient = jnp.where(inside, lhs, 0), jnp.where(inside, gradient, 0)
    to_rhs = _run("RAGGED_CONTRACTING_DOT", outer, target, lhs, gradient, sizes)
    return to_lhs.astype(lhs.dtype), to_rhs.astype(rhs.dtype), None


_product.defvjp(_forward, _backward)
