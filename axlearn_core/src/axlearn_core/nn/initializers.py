"""Parameter initializers: nodes that build functions `(key, shape, dtype, *, in_axis, out_axis) -> array`.

A layer offers `axes` to the node, the logical axis name of each dimension.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from axlearn_core.config import Node, node, setting


class Initializer(Protocol):
    """Function that initializes a parameter. `in_axis` and `out_axis` are the dimensions of the fan-in and fan-out."""

    def __call__(
        self, key: jax.Array, shape: Sequence[int], dtype: Any, *, in_axis: Sequence[int], out_axis: Sequence[int]
    ) -> jax.Array:
        """Return the initial value."""
        ...


@node
class VarianceScaling(Node[Initializer]):
    """Zero mean and variance `scale / fan`.

    A scale of 1.0 with fan-in is LeCun's initializer, 2.0 with fan-in is He's, and 1.0 with fan-avg is Glorot's. The fan
    is the product of the dimensions that the layer contracts (`fan_in`) or produces (`fan_out`).
    """

    scale: float = setting(default=1.0, gt=0)
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in"
    distribution: Literal["truncated_normal", "normal", "uniform"] = "truncated_normal"

    def build(self, **_: Any) -> Initializer:
        """Return the initializer."""

        def init(
            key: jax.Array, shape: Sequence[int], dtype: object, *, in_axis: Sequence[int], out_axis: Sequence[int]
        ) -> jax.Array:
            make = jax.nn.initializers.variance_scaling(
                self.scale, self.mode, self.distribution, in_axis=in_axis, out_axis=out_axis
            )
            return make(key, tuple(shape), dtype)

        return init


@node
class Normal(Node[Initializer]):
    """A normal distribution with zero mean."""

    stddev: float = setting(default=0.02, ge=0)

    def build(self, **_: Any) -> Initializer:
        """Return the initializer."""
        return lambda key, shape, dtype, **_: (self.stddev * jax.random.normal(key, shape)).astype(dtype)


@node
class Constant(Node[Initializer]):
    """A constant value."""

    value: float = 0.0

    def build(self, **_: Any) -> Initializer:
        """Return the initializer."""
        return lambda key, shape, dtype, **_: jnp.full(shape, self.value, dtype)
