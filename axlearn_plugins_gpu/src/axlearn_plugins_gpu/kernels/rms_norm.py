"""The `rms_norm` op, using tokamax's Triton kernels, forward and backward.

The kernels read each row once. However, a separate kernel prevents XLA from fusing the normalization with neighboring ops.
These kernels are therefore used only if a config names them.
"""

import functools
from typing import Any, NamedTuple

import jax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import MAX_WIDTH, norm_blocks
from axlearn_plugins_transformer.kernels.per_device import per_device
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp

AXES = {
    2: ("batch", None),
    3: ("batch", "sequence", None),
    4: ("batch", "sequence", "activation_heads", None),  # queries and keys, per head
}


class _Triton:
    """RMS norm kernel that keeps whole rows in registers. All arithmetic is in float32."""

    def supports(self, op: RMSNormOp, context: KernelContext) -> str | None:
        """Support rows of up to 16,384 elements, if all arrays have the same dtype, of at most 32 bits."""
        if reason := tokamax.unavailable_reason() or unknown_gpu(context.target):
            return reason
        dtypes, shape = set(op.dtypes.values()), op.x.shape
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
            return f"it needs one dtype of bfloat16, float16 and float32, got {', '.join(sorted(dtypes))}"
        if len(shape) not in AXES:
            return f"it supports 2 to 4 dimensions, not {len(shape)}"
        return None if shape[-1] <= MAX_WIDTH else f"a row of {shape[-1]} elements is longer than {MAX_WIDTH}"

    def __call__(self, op: RMSNormOp) -> jax.Array:
        """Return the normalized rows, [..., D]."""
        kernel_selection: Any = selection.get_active_selection()  # not None: `supports` accepts only known GPUs
        target: str = kernel_selection.target
        axes = AXES[op.x.ndim]

        def run(x: jax.Array, weight: jax.Array) -> jax.Array:
            return _normalize(x, weight, _Static(target, op.eps, op.offset))

        return per_device(run, [axes, (None,)], axes)(op.x, op.weight)


TRITON = _Triton()


class _Static(NamedTuple):
    """Static parameters for a call."""

    target: str
    eps: float
    offset: float

    @property
    def options(self) -> dict[str, Any]:
        """Options under tokamax's names."""
        return {"axis": -1, "epsilon": self.eps, "scale_offset": self.offset, "subtract_mean": False}


def _configure_operation(
    operation: Any, config: Any, static: _Static, x: jax.Array, per_warp: int, **options: Any
) -> Any:
    width = x.shape[-1]
    blocks = norm_blocks(static.target, x.size // width, width, per_warp)
    return operation(config=config(block_m=blocks.rows, block_n=None, num_warps=blocks.warps), **options)


def _run(x: jax.Array, weight: jax.Array, static: _Static, **options: Any) -> Any:
    library = tokamax.module("ops.normalization.pallas_triton")
    # x is still needed in the residual stream, so the result must not alias it.
    norm = _configure_operation(
        library.PallasTritonNormalization, library.Config, static, x, 1024, input_output_alias=False
    )
    with tokamax.use_target(static.target):
        return norm(x, weight, None, **static.options, **options)


# Define the derivative here: when tokamax's own is traced, it checks whether the local machine can run the kernel.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalize(x: jax.Array, weight: jax.Array, static: _Static) -> jax.Array:
    return _run(x, weight, static)


def _forward(x: jax.Array, weight: jax.Array, static: _Static) -> tuple[jax.Array, Any]:
    out, statistics = _run(x, weight, static, return_residuals=True)
    return out, (x, weight, statistics)


def _backward(static: _Static, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, statistics = residuals
    library = tokamax.module("ops.normalization.pallas_triton_vjp")
    derivative = _configure_operation(library.PallasTritonNormalizationVjp, library.Config, static, x, 2048)
    with tokamax.use_target(static.target):
        grad_x, grad_weight, _ = derivative(statistics, x, gradient, x, weight, None, **static.options)
    return grad_x, grad_weight


_normalize.defvjp(_forward, _backward)
