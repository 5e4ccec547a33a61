"""The op `rms_norm` (Zhang & Sennrich, 2019)."""

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
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis, the mean in float32.

    The result is [..., D] in the dtype of the weight.

    Attributes:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        offset: added to the weight.
    """

    name = "rms_norm"

    x: jax.Array
    weight: jax.Array
    eps: float = attrs.field(kw_only=True)
    offset: float = attrs.field(default=0.0, kw_only=True)

    def operands(self) -> Mapping[str, Any]:
        """Input and weight."""
        return {"x": self.x, "weight": self.weight}

    def options(self) -> Mapping[str, Any]:
        """Epsilon and offset."""
        return {"eps": self.eps, "offset": self.offset}

    def flops(self) -> float:
        """None: it multiplies no matrices."""
        return 0.0

    def reference(self) -> jax.Array:
        """Elementwise operations, which XLA fuses with their neighbours."""
        y = self.x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight + self.offset if self.offset else self.weight
        return y.astype(weight.dtype) * expand_to(weight, self.x.ndim)
