"""Grouped matmuls with megablox (`jax.experimental.pallas.ops.tpu.megablox`; Gale et al., 2022).

M rows, G groups, K inner and N outer dimension.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import ops

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_tpu.kernels.blocks import LANES, tiles

if TYPE_CHECKING:  # a program imports this module only if it uses the op
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp


class _Megablox:
    """Megablox kernel. A tile spans groups only at their boundaries, so work is proportional to the number of rows."""

    def supports(self, op: "GroupedMatmulOp", context: KernelContext) -> str | None:
        """Support bfloat16 or float32 matrices whose dimensions are both at least `LANES`."""
        inner, outer = op.rhs.shape[1:]
        dtypes = set(op.dtypes.values())
        if min(inner, outer) < LANES:
            return f"the matrices are {inner} x {outer}; both dimensions must be at least {LANES}"
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
            return f"all operands must have the same dtype, bfloat16 or float32, got {', '.join(sorted(dtypes))}"
        return None

    def __call__(self, op: "GroupedMatmulOp") -> jax.Array:
        """Return the matmul results, [M, N]. The caller has already split the operands across devices."""
        kernel_selection = selection.get_active_selection()
        lhs, rhs = op.lhs, op.rhs
        rows = lhs.shape[0]
        tiling = tiles(kernel_selection.target if kernel_selection else "", rows, rhs.shape[1:], lhs.dtype.itemsize)
        padded = jnp.pad(lhs, ((0, -rows % tiling[0]), (0, 0)))  # the padding rows belong to no group
        return ops.gmm(padded, rhs, op.sizes, lhs.dtype, tiling)[:rows]


MEGABLOX = _Megablox()
