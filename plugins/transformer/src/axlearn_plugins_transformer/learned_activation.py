"""Activation functions with parameters."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import node, setting
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.layer import Layer, Precision


class FixedNumber(nnx.Variable):
    """A number that training does not change, although files store it with the weights."""


class XIELU(Layer):
    """A quadratic function above zero and an exponential one below, with trained slopes (Huang, 2024, arXiv 2411.13010).

    With p = softplus(alpha_positive) and n = beta + softplus(alpha_negative), it is p x^2 + beta x above zero, and
    n (exp(x) - 1 - x) + beta x below. It is used by Apertus.
    """

    @node
    class Config(Layer.Config["XIELU"]):
        """Settings for the initial shape.

        Attributes:
            positive: Initial value of p.
            negative: Initial value of n; it is larger than beta.
            beta: Slope at zero. Import overwrites it.
            eps: Upper bound on the argument of the exponential function. Import overwrites it.
        """

        positive: float = setting(default=0.8, gt=0, kind="training")
        negative: float = setting(default=0.8, gt=0, kind="training")
        beta: float = setting(default=0.5, ge=0, kind="training")
        eps: float = setting(default=-1e-6, le=0, kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        for name, value in (("positive", cfg.positive), ("negative", cfg.negative - cfg.beta)):
            init = Constant(value=math.log(math.expm1(value)))
            setattr(self, f"alpha_{name}", self.parameter(rngs, init, (1,), (None,)))
        for name, value in (("beta", cfg.beta), ("eps", cfg.eps)):
            setattr(self, name, FixedNumber(jnp.float32(value), eager_sharding=False))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the function to each element."""
        beta, eps = (number[...].astype(x.dtype) for number in (self.beta, self.eps))
        positive, negative = (
            jax.nn.softplus(self.computed(alpha)[0]).astype(x.dtype) for alpha in (self.alpha_positive, self.alpha_negative)
        )
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + negative)
        return jnp.where(x > 0, positive * x * x, below) + beta * x
