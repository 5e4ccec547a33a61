"""The `rms_norm` op (Zhang & Sennrich, 2019)."""

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.kernels.op import Op
from axlearn_core.nn.layer import expand_to


@attrs.frozen(eq=False)
class RMSNormOp(Op[jax.Array]):
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis.

    The mean is computed in float32. The result is [..., D] in the dtype of the weight.

    Attributes:
        x: [..., D].
        weight: [D].
        eps: Constant added to the mean square.
        offset: Constant added to the weight.
    """

    name = "rms_norm"

    x: jax.Array
    weight: jax.Array
    eps: float = attrs.field(kw_only=True)
    offset: float = attrs.field(default=0.0, kw_only=True)

    def operands(self) -> Mapping[str, Any]:
        """Return the input and the weight."""
        return {"x": self.x, "weight": self.weight}

    def options(self) -> Mapping[str, Any]:
        """Return epsilon and offset."""
        return {"eps": self.eps, "offset": self.offset}

    def flops(self) -> float:
        """Return 0, because the op does not multiply matrices."""
        return 0.0

    def reference(self) -> jax.Array:
        """Compute the norm elementwise, so that XLA can fuse it with adjacent operations."""
        y = self.x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight + self.offset if self.offset else self.weight
        return y.astype(weight.dtype) * expand_to(weight, self.x.ndim)
