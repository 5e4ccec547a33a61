"""The `dynamic-tanh` component."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.extend import Constant, Layer, Precision, expand_to, interface, node, setting


class DynamicTanh(Layer):
    """Computes `weight * tanh(alpha * x)` instead of a norm, with a learned `alpha`.

    Source: Zhu et al., 2025, arXiv 2503.10622.
    """

    @node
    class Config(Layer.Config["DynamicTanh"]):
        """Settings for `DynamicTanh`.

        Attributes:
            dim: Size of the last dimension. The parent layer sets it.
            alpha: Initial value of the learned slope.
        """

        dim: int = interface()
        alpha: float = setting(default=0.5, gt=0)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, Constant(value=1.0), (cfg.dim,), ("norm",))
        self.alpha = self.parameter(rngs, Constant(value=cfg.alpha), (1,), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., dim] to [..., dim]."""
        alpha, weight = (expand_to(self.computed(p), x.ndim) for p in (self.alpha, self.weight))
        return jnp.tanh(x * alpha) * weight
