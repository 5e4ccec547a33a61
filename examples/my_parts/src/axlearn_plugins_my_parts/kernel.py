"""The `product` kernel for the `rms_norm` op."""

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.extend import KernelContext, expand_to
from axlearn_plugins_transformer.kernels.rms_norm import RMSNormOp


class ProductNorm:
    """Sums the squares with a dot product, which a compiler can map to a matrix unit."""

    def supports(self, op: RMSNormOp, context: KernelContext) -> str | None:
        """Return None if the op is supported, otherwise the reason.

        Rejects float64 because the kernel accumulates in float32.
        """
        return "it accumulates in float32, but the input is float64" if op.x.dtype == jnp.float64 else None

    def __call__(self, op: RMSNormOp) -> jax.Array:
        """Return the normalized input, [..., D], like the reference."""
        squares = jnp.einsum("...d,...d->...", op.x, op.x, preferred_element_type=jnp.float32)
        y = op.x.astype(jnp.float32) * lax.rsqrt(squares[..., None] / op.x.shape[-1] + op.eps)
        weight = op.weight + op.offset if op.offset else op.weight
        return y.astype(weight.dtype) * expand_to(weight, op.x.ndim)


PRODUCT = ProductNorm()
