"""Grouped matrix products by tokamax's kernel for TPUs, where it is installed: an optional extra, for it brings many packages.

Megablox with a pipeline of its own, which fetches tiles over an inner loop. Without quantization, which it has too.

M rows, G groups, K inner and N outer dimension.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_tpu import compat
from axlearn_plugins_tpu.kernels.blocks import LANES, tiles
from axlearn_plugins_tpu.kernels.chip import known_chip

if TYPE_CHECKING:  # only a program that has the op loads this module
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp

VERSION = "0.0.14" if sys.version_info >= (3, 12) else "0.0.12"
"""The one whose kernels are used. They have no public names."""

_FIX = "pip install 'axlearn-plugins-tpu[kernels]'"

Tiling = tuple[int, int, int]
"""Rows, and of K and N, to a tile."""


def missing() -> str | None:
    """Why its kernels cannot be used; None where they can."""
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return f"tokamax is not installed: {_FIX}"
    return None if version == VERSION else f"tokamax {version} is not {VERSION}, whose kernels are used: {_FIX}"


class _Mosaic:
    """Tiles of rows, each of one group or at the border of several, fetched by a pipeline of the kernel's own."""

    def supports(self, op: "GroupedMatmulOp", context: KernelContext) -> str | None:
        """From v5 on; both dimensions of the matrices whole lanes, in bfloat16 or float32."""
        if reason := missing():
            return reason
        dtypes = set(op.dtypes.values())
        if context.target == "tpu-v4":
            return "tokamax has it for TPUs from v5 on, not for v4"
        for size in op.rhs.shape[1:]:
            if size % LANES:
                return f"the dimension {size} is not a multiple of {LANES}"
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes bfloat16, or float32"
        return None

    def __call__(self, op: "GroupedMatmulOp") -> jax.Array:
        """[M, N]. The caller has split everything among devices."""
        kernel_selection = selection.in_force()
        lhs, rhs = op.lhs, op.rhs
        rows = lhs.shape[0]
        tiling = tiles(kernel_selection.target if kernel_selection else "", rows, rhs.shape[1:], lhs.dtype.itemsize)
        padded = jnp.pad(lhs, ((0, -rows % tiling[0]), (0, 0)))  # rows of no group
        product: Any = _product(padded, rhs, op.sizes, tiling)
        return product[:rows]


MOSAIC = _Mosaic()


@contextlib.contextmanager
def kernels_of(module: str) -> Iterator[Any]:
    """One of tokamax's modules of kernels (`ragged_dot.pallas_mosaic_tpu_kernel`), while one of them is traced."""
    with (
        known_chip(),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses names that JAX is moving
        yield compat.tokamax(module)


_kernels = functools.partial(kernels_of, "ragged_dot.pallas_mosaic_tpu_kernel")


# tokamax's own derivative gives every product the tiles that it finds in its table, for a chip that the table does not name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, tiling: Tiling) -> jax.Array:
    with _kernels() as kernels:
        return kernels.gmm(lhs, rhs, sizes, precision=None, out_dtype=lhs.dtype, tiling=tiling)


def _forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, tiling: Tiling) -> tuple[jax.Array, Any]:
    return _product(lhs, rhs, sizes, tiling), (lhs, rhs, sizes)


def _backward(tiling: Tiling, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    rows, inner, outer = tiling
    with _kernels() as kernels:
        to_lhs = kernels.gmm(
            gradient,
            rhs,
            sizes,
            precision=None,
            out_dtype=lhs.dtype,
            tiling=(rows, outer, inner),
            transpose_rhs=True,
        )
        to_rhs = kernels.tgmm(lhs.T, gradient, sizes, precision=None, out_dtype=rhs.dtype, tiling=tiling)
    return to_lhs, to_rhs, None


_product.defvjp(_forward, _backward)
