"""The `gated_linear_unit` op, using tokamax's kernels in Triton and Mosaic GPU. The backward passes use XLA.

One kernel computes both matmuls and the activation. Without gradients, neither matmul result is written to memory. With
gradients, Triton's kernel writes both results. Mosaic's kernel does not: its backward pass recomputes them, so remat
policies that save them (`mlp_gate`, `mlp_up`) have no effect. The kernels need a copy of the two matrices side by side, while
XLA's own matmuls use cuBLAS. The kernels are therefore used only if a config names them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_core.nn.remat import tag
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import GATED_MOSAIC, GATED_MOSAIC_LATER, PipelinedBlocks, gated_blocks
from axlearn_plugins_gpu.kernels.mosaic import refusal, use_mosaic_target
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS, Activation, GatedLinearUnitOp
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device

ROWS = ("batch", "sequence", None)
HIDDEN = ("batch", "sequence", "activation_mlp")
MATRIX = (None, "activation_mlp")
MULTIPLE = 32
"""Required divisor of the rows and of the inner and outer dimensions on each device: the smallest block of Triton's kernel."""

WITHOUT_RULES: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda x: jnp.maximum(x, 0),
    "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
}
"""Activations that JAX implements with custom derivative rules, which a Mosaic kernel cannot contain."""


class _Tokamax:
    """Base class for both kernels. A block of rows is multiplied by the same columns of both matrices."""

    mosaic: bool

    def supports(self, op: GatedLinearUnitOp, context: KernelContext) -> str | None:
        """Support projections that are plain matrices in one 16-bit dtype, with sides that are multiples of the block sizes."""
        if reason := tokamax.unavailable_reason() or unknown_gpu(context.target):
            return reason
        if self.mosaic and (reason := _mosaic_refusal(context.target)):
            return reason
        shape = op.x.shape
        if not op.plain:
            return "it needs plain matrices, and a projection has more than a matrix (an adapter, a bias, quantization)"
        dtypes = set(op.dtypes.values())
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
            return f"all operands must have the same dtype, bfloat16 or float16, got {', '.join(sorted(dtypes))}"
        if op.activation == "gelu":
            return "it does not support the error function; gelu_tanh is an approximation without it"
        if len(shape) != 3 or op.operands()["gate"].shape != op.operands()["up"].shape:
            return "it needs rows [B, S, D] and two matrices of the same shape"
        return self._check_shapes(op, context.target)

    def _check_shapes(self, op: GatedLinearUnitOp, target: str) -> str | None:
        *rows, inner = op.x.shape
        local_sizes = (math.prod(_local(rows, ROWS[:2])), inner, *_local((op.hidden_dim,), MATRIX[1:]))
        multiples = (MULTIPLE,) * 3
        if self.mosaic:
            blocks = _pipelines()[CHIPS[target].capability]
            multiples = (blocks.m, blocks.k, blocks.n * blocks.warp_groups)
        for name, size, multiple in zip(
            ("number of rows", "width", "hidden size"), local_sizes, multiples, strict=True
        ):
            if size % multiple:
                return f"the {name} on a device, {size}, is not a multiple of {multiple}"
        return None

    def __call__(self, op: GatedLinearUnitOp) -> jax.Array:
        """Return the output of the gated linear unit, [B, S, F]."""
        kernel_selection: Any = selection.get_active_selection()  # not None: `supports` accepts only known GPUs
        target: str = kernel_selection.target
        activation: Any = op.activation  # a name: these kernels do not declare `custom_activation`
        unit = _pipelined_unit if self.mosaic else _gated_unit

        for name in ("mlp_gate", "mlp_up"):  # announce the tags to remat; the derivative applies them to the values
            tag(jnp.zeros(()), name)

        def run(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
            return unit(x, gate, up, target, activation)

        return per_device(run, [ROWS, MATRIX, MATRIX], HIDDEN)(*op.matrices())


class _Triton(_Tokamax):
    """Triton kernel; a few warps compute one block."""

    mosaic = False


class _Mosaic(_Tokamax):
    """Mosaic GPU kernel; loads and matmuls are pipelined."""

    mosaic = True


TRITON, MOSAIC = _Triton(), _Mosaic()


def _pipelines() -> dict[tuple[int, int], PipelinedBlocks]:
    return GATED_MOSAIC_LATER if tokamax.LATER else GATED_MOSAIC


def _mosaic_refusal(target: str) -> str | None:
    if CHIPS[target].capability not in _pipelines():
        return f"tokamax {tokamax.VERSION} has no kernel for {target} that is known to compile"
    return refusal(target)


def _local(sizes: Any, axes: Any) -> tuple[int, ...]:
    """Return the sizes of dimensions on one device."""
    return tuple(size // n for size, n in zip(sizes, count_shards(sizes, axes), strict=True))


def _run(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation, **options: Any) -> Any:
    kernels = tokamax.module("ops.gated_linear_unit.pallas_triton")
    blocks = gated_blocks(target, x.size // x.shape[-1], gate.shape[1])
    config = kernels.Config(
        block_m=blocks.m, block_n=blocks.n, block_k=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages
    )
    with tokamax.use_target(target), tokamax.use_core_count(target):
        unit = kernels.PallasTritonGatedLinearUnit(config=config)
        return unit(x, (gate, up), activation=ACTIVATIONS[activation], **options)


# tokamax's own derivative inspects the trace of a function through names that JAX is moving.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gated_unit(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> jax.Array:
    return _run(x, gate, up, target, activation)


def _forward(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> Any:
    out, products = _run(x, gate, up, target, activation, return_residuals=True)
    gates, ups = (checkpoint_name(products[..., i, :], name) for i, name in enumerate(("mlp_gate", "mlp_up")))
    return out, (x, gate, up, gates, ups)


def _gradients(
    activation: Activation, x: jax.Array, gate: jax.Array, up: jax.Array, gates: Any, ups: Any, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the gradients with respect to x, gate and up."""

    def product(gates: jax.Array, ups: jax.Array) -> jax.Array:
        return (ACTIVATIONS[activation](gates.astype(jnp.float32)) * ups.astype(jnp.float32)).astype(x.dtype)

    grad_gates, grad_ups = jax.vjp(product, gates, ups)[1](gradient)
    grad_x = grad_gates @ gate.T + grad_ups @ up.T
    grad_gate, grad_up = (jnp.einsum("bsd,bsf->df", x, y) for y in (grad_gates, grad_ups))
    return grad_x, grad_gate, grad_up


def _backward(target: str, activation: Activation, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
    x, gate, up, gates, ups = residuals
    return _gradients(activation, x, gate, up, gates, ups, gradient)


_gated_unit.defvjp(_forward, _backward)


# Mosaic's kernel does not return the matmul results. With tokamax's own differentiation, XLA would compute them, and the
# kernel would not run at all.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _pipelined_unit(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> jax.Array:
    kernels, blocks = tokamax.module("ops.gated_linear_unit.pallas_mosaic_gpu"), _pipelines()[CHIPS[target].capability]
    config = kernels.Config(tile_m=blocks.m, tile_n=blocks.n, tile_k=blocks.k, num_stages=blocks.stages)
    with use_mosaic_target(target), tokamax.use_core_count(target):
        unit = kernels.PallasMosaicGpuGatedLinearUnit(config=config)
        return unit(x, (gate, up), activation=WITHOUT_RULES.get(activation, ACTIVATIONS[activation]))


def _pipelined_forward(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> Any:
    return _pipelined_unit(x, gate, up, target, activation), (x, gate, up)


def _pipelined_backward(
    target: str, activation: Activation, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    x, gate, up = residuals
    return _gradients(activation, x, gate, up, x @ gate, x @ up, gradient)


_pipelined_unit.defvjp(_pipelined_forward, _pipelined_backward)
