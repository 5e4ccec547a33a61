"""Activation functions with parameters."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import node, setting
from axlearn_core.errors import Problem
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

        def validate(self) -> Iterable[Problem]:
            """Check that n can be positive."""
            yield from super().validate()
            if self.negative <= self.beta:
                yield Problem(
                    path="negative",
                    message="must be larger than beta",
                    got=f"negative={self.negative}, beta={self.beta}",
                    fix="raise negative, or lower beta",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.alpha_positive = self.parameter(rngs, _inverse_softplus(cfg.positive), (1,), (None,))
        self.alpha_negative = self.parameter(rngs, _inverse_softplus(cfg.negative - cfg.beta), (1,), (None,))
        self.beta = FixedNumber(jnp.float32(cfg.beta), eager_sharding=False)
        self.eps = FixedNumber(jnp.float32(cfg.eps), eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the function to each element."""
        beta, eps = (number[...].astype(x.dtype) for number in (self.beta, self.eps))
        positive, negative = (
            jax.nn.softplus(self.computed(alpha)[0]).astype(x.dtype)
            for alpha in (self.alpha_positive, self.alpha_negative)
        )
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + negative)
        return jnp.where(x > 0, positive * x * x, below) + beta * x


def _inverse_softplus(value: float) -> Constant:
    return Constant(value=math.log(math.expm1(value)))
