"""Initializers of decays and time steps."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import Node, node, setting
from axlearn_core.nn.initializers import Initializer


@node
class LogUniformRate(Node[Initializer]):
    """The logarithm of a rate that is uniform in a range, as in Mamba-2.

    Attributes:
        low: Smallest rate.
        high: Largest rate.
    """

    low: float = setting(default=1.0, gt=0)
    high: float = setting(default=16.0, gt=0)

    def build(self, **_: Any) -> Initializer:
        """Return the initializer."""

        def init(key: jax.Array, shape: Sequence[int], dtype: Any, **_: Any) -> jax.Array:
            return jnp.log(jax.random.uniform(key, tuple(shape), minval=self.low, maxval=self.high)).astype(dtype)

        return init


@node
class TimeStepBias(Node[Initializer]):
    """A bias whose softplus is a time step with a uniform logarithm, as in Mamba-2.

    Attributes:
        low: Smallest time step.
        high: Largest time step.
    """

    low: float = setting(default=1e-3, gt=0)
    high: float = setting(default=1e-1, gt=0)

    def build(self, **_: Any) -> Initializer:
        """Return the initializer."""

        def init(key: jax.Array, shape: Sequence[int], dtype: Any, **_: Any) -> jax.Array:
            low, high = math.log(self.low), math.log(self.high)
            step = jnp.exp(jax.random.uniform(key, tuple(shape), minval=low, maxval=high))
            return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)

        return init
