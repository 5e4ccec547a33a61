"""The op `gated_linear_unit` by tokamax's Triton kernel; its backward pass is XLA's.

Both products and the activation in one kernel: without gradients neither product goes to memory. XLA's own products come from
cuBLAS, and the kernel needs the two matrices side by side, which takes a copy: it is for configs that name it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
from axlearn_core.nn.remat import tag
from axlearn_plugins_gpu.chips import unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import gated
from axlearn_plugins_transformer.kernels.gated_linear_unit import ACTIVATIONS, Activation, matrices
from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

ROWS = ("batch", "sequence", None)
HIDDEN = ("batch", "sequence", "activation_mlp")
MATRIX = (None, "activation_mlp")
MULTIPLE = 32
"""Of rows, inner and outer dimension on each device: the smallest block."""


class _Triton:
    """Blocks of rows, each with the same columns of both matrices."""

    def supports(self, request: OpRequest) -> str | None:
        """Projections that are plain matrices, in one dtype of 16 bits, with dimensions that its blocks divide."""
        if reason := tokamax.missing() or unknown_gpu(request.target):
            return reason
        options, shape = request.options, request.shapes["x"]
        if not options["plain"]:
            return "it needs the matrices, and a projection is more than a product with one (adapters, a bias, quantization)"
        dtypes = set(request.dtypes.values())
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes bfloat16, or float16"
        if options["activation"] == "gelu":
            return "Triton has no error function here: gelu_tanh is its approximation"
        if len(shape) != 3 or request.shapes["gate"] != request.shapes["up"]:
            return "it takes rows [B, S, D] and two matrices of the same shape"
        rows, (inner, outer) = shape[:2], request.shapes["gate"]
        here = (math.prod(_local(rows, ROWS[:2])), inner, *_local((outer,), MATRIX[1:]))
        for name, size in zip(("number of rows", "width", "hidden size"), here, strict=True):
            if size % MULTIPLE:
                return f"the {name} on a device, {size}, is no multiple of {MULTIPLE}"
        return None

    def __call__(self, x: jax.Array, gate: Any, up: Any, *, activation: Activation) -> jax.Array:
        """See `axlearn_plugins_transformer.kernels.gated_linear_unit.gated_linear_unit`."""
        chosen: Any = selection.in_force()  # where there is none, `supports` has said that the GPU is not known
        target: str = chosen.target

        for name in ("mlp_gate", "mlp_up"):  # remat has to know the tags, which the derivative gives to the values
            tag(jnp.zeros(()), name)

        def run(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
            return _gated(x, gate, up, target, activation)

        return per_device(run, [ROWS, MATRIX, MATRIX], HIDDEN)(*matrices(x, gate, up))


TRITON = _Triton()


def _local(sizes: Any, axes: Any) -> tuple[int, ...]:
    """What a device has of dimensions."""
    return tuple(size // n for size, n in zip(sizes, parts_of(sizes, axes), strict=True))


def _run(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation, **options: Any) -> Any:
    kernels = tokamax.module("ops.gated_linear_unit.pallas_triton")
    blocks = gated(target, x.size // x.shape[-1], gate.shape[1])
    config = kernels.Config(
        block_m=blocks.m, block_n=blocks.n, block_k=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages
    )
    with tokamax.for_target(), tokamax.numbered_for(target):
        unit = kernels.PallasTritonGatedLinearUnit(config=config)
        return unit(x, (gate, up), activation=ACTIVATIONS[activation], **options)


# tokamax's own derivative takes the trace of a function apart by names that JAX is moving.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gated(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> jax.Array:
    return _run(x, gate, up, target, activation)


def _forward(x: jax.Array, gate: jax.Array, up: jax.Array, target: str, activation: Activation) -> Any:
    out, products = _run(x, gate, up, target, activation, return_residuals=True)
    gates, ups = (checkpoint_name(products[..., i, :], name) for i, name in enumerate(("mlp_gate", "mlp_up")))
    return out, (x, gate, up, gates, ups)


def _backward(target: str, activation: Activation, kept: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
    x, gate, up, gates, ups = kept

    def product(gates: jax.Array, ups: jax.Array) -> jax.Array:
        return (ACTIVATIONS[activation](gates.astype(jnp.float32)) * ups.astype(jnp.float32)).astype(x.dtype)

    to_gates, to_ups = jax.vjp(product, gates, ups)[1](gradient)
    to_x = to_gates @ gate.T + to_ups @ up.T
    to_gate, to_up = (jnp.einsum("bsd,bsf->df", x, y) for y in (to_gates, to_ups))
    return to_x, to_gate, to_up


_gated.defvjp(_forward, _backward)
