"""The op `rms_norm` by tokamax's Triton kernels, forward and backward.

Each reads a row once. XLA fuses the normalisation with what stands around it, which a kernel of its own prevents: it is for
configs that name it.
"""

import functools
from typing import Any, NamedTuple

import jax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import WIDEST, normalized
from axlearn_plugins_transformer.kernels.per_device import per_device
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp

AXES = {
    2: ("batch", None),
    3: ("batch", "sequence", None),
    4: ("batch", "sequence", "activation_heads", None),  # queries and keys, by heads
}


class _Triton:
    """Whole rows in registers, all arithmetic in float32."""

    def supports(self, op: RMSNormOp, context: KernelContext) -> str | None:
        """Rows of up to 16,384 numbers, in one dtype of up to 32 bits."""
        if reason := tokamax.missing() or unknown_gpu(context.target):
            return reason
        dtypes, shape = set(op.dtypes.values()), op.x.shape
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes one of bfloat16, float16 and float32"
        if len(shape) not in AXES:
            return f"it takes 2 to 4 dimensions, not {len(shape)}"
        return None if shape[-1] <= WIDEST else f"a row of {shape[-1]} numbers is longer than {WIDEST}"

    def __call__(self, op: RMSNormOp) -> jax.Array:
        """[..., D]."""
        kernel_selection: Any = (
            selection.in_force()
        )  # where there is none, `supports` has said that the GPU is not known
        target: str = kernel_selection.target
        axes = AXES[op.x.ndim]

        def run(x: jax.Array, weight: jax.Array) -> jax.Array:
            return _normalize(x, weight, _Static(target, op.eps, op.offset))

        return per_device(run, [axes, (None,)], axes)(op.x, op.weight)


TRITON = _Triton()


class _Static(NamedTuple):
    """What of a call is known while tracing."""

    target: str
    eps: float
    offset: float

    @property
    def options(self) -> dict[str, Any]:
        """As tokamax calls them."""
        return {"axis": -1, "epsilon": self.eps, "scale_offset": self.offset, "subtract_mean": False}


def _configure_operation(
    operation: Any, config: Any, static: _Static, x: jax.Array, per_warp: int, **options: Any
) -> Any:
    width = x.shape[-1]
    blocks = normalized(static.target, x.size // width, width, per_warp)
    return operation(config=config(block_m=blocks.rows, block_n=None, num_warps=blocks.warps), **options)


def _run(x: jax.Array, weight: jax.Array, static: _Static, **options: Any) -> Any:
    library = tokamax.module("ops.normalization.pallas_triton")
    # x lives on in the residual stream: the result cannot take its place.
    norm = _configure_operation(
        library.PallasTritonNormalization, library.Config, static, x, 1024, input_output_alias=False
    )
    with tokamax.for_target(static.target):
        return norm(x, weight, None, **static.options, **options)


# tokamax's own derivative asks this machine, while it is traced, whether it can run the kernel.
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
    with tokamax.for_target(static.target):
        to_x, to_weight, _ = derivative(statistics, x, gradient, x, weight, None, **static.options)
    return to_x, to_weight


_normalize.defvjp(_forward, _backward)
