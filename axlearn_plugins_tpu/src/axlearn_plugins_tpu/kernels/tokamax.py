"""Grouped matmuls with tokamax's TPU kernel. tokamax is an optional extra because it has many dependencies.

The kernel is megablox with its own pipeline, which fetches tiles in an inner loop. Its support for quantization is not used.

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
from axlearn_plugins_tpu.kernels.chip import use_target_chip

if TYPE_CHECKING:  # a program imports this module only if it uses the op
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp

VERSION = "0.0.14" if sys.version_info >= (3, 12) else "0.0.12"
"""Supported version of tokamax. Its kernels have no public names."""

_FIX = "pip install 'axlearn-plugins-tpu[kernels]'"

Tiling = tuple[int, int, int]
"""Tile sizes: rows, K and N."""


def unavailable_reason() -> str | None:
    """Return why tokamax cannot be used, or None if it can."""
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return f"tokamax is not installed: {_FIX}"
    return None if version == VERSION else f"tokamax {version} is installed, but {VERSION} is required: {_FIX}"


class _Mosaic:
    """Grouped matmul kernel. A tile spans several groups only at their boundaries. The kernel pipelines its loads."""

    def supports(self, op: "GroupedMatmulOp", context: KernelContext) -> str | None:
        """Support v5 and later, and bfloat16 or float32 matrices with dimensions that are multiples of `LANES`."""
        if reason := unavailable_reason():
            return reason
        dtypes = set(op.dtypes.values())
        if context.target == "tpu-v4":
            return "tokamax supports TPU v5 and later, not v4"
        for size in op.rhs.shape[1:]:
            if size % LANES:
                return f"the dimension {size} is not a multiple of {LANES}"
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
        product: Any = _product(padded, rhs, op.sizes, tiling)
        return product[:rows]


MOSAIC = _Mosaic()


@contextlib.contextmanager
def use_kernels(module: str) -> Iterator[Any]:
    """Yield one of tokamax's kernel modules (`ragged_dot.pallas_mosaic_tpu_kernel`), for tracing its kernels."""
    with (
        use_target_chip(),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # tokamax uses names that JAX is moving
        yield compat.tokamax(module)


_kernels = functools.partial(use_kernels, "ragged_dot.pallas_mosaic_tpu_kernel")


# tokamax's own derivative picks tiles from its table for every matmul, and the table lacks some chips.
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
        grad_lhs = kernels.gmm(
            gradient,
            rhs,
            sizes,
            precision=None,
            out_dtype=lhs.dtype,
            tiling=(rows, outer, inner),
            transpose_rhs=True,
        )
        grad_rhs = kernels.tgmm(lhs.T, gradient, sizes, precision=None, out_dtype=rhs.dtype, tiling=tiling)
    return grad_lhs, grad_rhs, None


_product.defvjp(_forward, _backward)
