"""The op `grouped_matmul` by tokamax's Triton kernel, forward and backward.

XLA has no code of its own for it on GPUs: `jax.lax.ragged_dot` computes every group for all rows there.
"""

import functools
from typing import Any

import jax

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import Blocks, grouped


class _Triton:
    """Blocks of rows of one group at a time, the work that of the rows."""

    def supports(self, request: OpRequest) -> str | None:
        """16-bit numbers, dimensions that its blocks divide."""
        if reason := tokamax.missing() or unknown_gpu(request.target):
            return reason
        if dtype := next((d for d in request.dtypes.values() if d not in ("bfloat16", "float16")), None):
            return f"it takes bfloat16 and float16, not {dtype}"
        blocks = grouped(request.target)
        for size in request.shapes["rhs"][1:]:
            if size % blocks.n or size % blocks.k:
                return f"the dimension {size} is no multiple of {max(blocks.n, blocks.k)}"
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """See `axlearn_plugins_moe.grouped_matmul.grouped_matmul`. Its caller has split everything among devices."""
        chosen: Any = selection.in_force()  # where there is none, `supports` has said that the GPU is not known
        return _product(lhs, rhs, sizes, grouped(chosen.target))


TRITON = _Triton()


def _run(dimensions: str, blocks: Blocks, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    kernels, base = tokamax.module("ops.ragged_dot.pallas_triton"), tokamax.module("ops.ragged_dot.base")
    config = kernels.Config(
        block_m=blocks.m, block_n=blocks.n, block_k=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages
    )
    with tokamax.for_target():
        return kernels.PallasTritonRaggedDot(config=config)(
            lhs, rhs, group_sizes=sizes, ragged_dot_dimension_numbers=getattr(base, f"{dimensions}_DIM_NUMS")
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, blocks: Blocks) -> jax.Array:
    return _run("DEFAULT_RAGGED_DOT", blocks, lhs, rhs, sizes)


def _forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, blocks: Blocks) -> tuple[jax.Array, Any]:
    return _product(lhs, rhs, sizes, blocks), (lhs, rhs, sizes)


def _backward(blocks: Blocks, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = kept
    to_lhs = _run("TRANS_RHS_RAGGED_DOT", blocks, gradient, rhs, sizes)
    to_rhs = _run("RAGGED_CONTRACTING_DOT", blocks, lhs, gradient, sizes)
    return to_lhs.astype(lhs.dtype), to_rhs.astype(rhs.dtype), None


_product.defvjp(_forward, _backward)
