"""Grouped matrix products by megablox (`jax.experimental.pallas.ops.tpu.megablox`; Gale et al., 2022).

M rows, G groups, K inner and N outer dimension.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import ops

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
from axlearn_plugins_tpu.kernels.blocks import LANES, tiles


class _Megablox:
    """Tiles of rows, each of one group or at the border of several; the work is that of the rows."""

    def supports(self, request: OpRequest) -> str | None:
        """Both dimensions of the matrices at least a lane wide, in bfloat16 or float32."""
        inner, outer = request.shapes["rhs"][1:]
        dtypes = set(request.dtypes.values())
        if min(inner, outer) < LANES:
            return f"the matrices are {inner} x {outer}; it wants at least {LANES} either way"
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes bfloat16, or float32"
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """See `axlearn_plugins_moe.grouped_matmul.grouped_matmul`. Its caller has split everything among devices."""
        chosen = selection.in_force()
        rows = lhs.shape[0]
        tiling = tiles(chosen.target if chosen else "", rows, rhs.shape[1:], lhs.dtype.itemsize)
        padded = jnp.pad(lhs, ((0, -rows % tiling[0]), (0, 0)))  # rows of no group
        return ops.gmm(padded, rhs, sizes, lhs.dtype, tiling)[:rows]


MEGABLOX = _Megablox()
