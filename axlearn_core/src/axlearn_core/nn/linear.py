"""Linear maps."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.initializers import Constant, Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision, expand_to
from axlearn_core.nn.sharding import is_sharded


class Projection(Protocol):
    """Maps the trailing input dimensions to the output dimensions.

    Built with `input_dims`, `output_dims` (tuples) and `axes` (one logical name for each of both), in addition to `rngs`,
    `precision`.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        ...


class Linear(Layer):
    """`x @ weight + bias`, where either side may be several dimensions ([D] -> [heads, head_dim])."""

    @node
    class Config(Layer.Config["Linear"]):
        """`init` is scaled by the fan of all input dimensions; the bias starts at zero."""

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        bias: bool = False
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        count = len(cfg.input_dims)
        shape = (*cfg.input_dims, *cfg.output_dims)
        self.weight = self.parameter(rngs, cfg.init, shape, axes, fan_in=range(count), fan_out=range(count, len(shape)))
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), cfg.output_dims, tuple(axes)[count:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        y = linear_product(x.astype(self.precision.compute), self.computed(self.weight), len(self.cfg.input_dims))
        return y + expand_to(self.computed(self.bias), y.ndim) if self.cfg.bias else y

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """What each of a stack of these maps makes of its own rows: `product(x, weights)` multiplies rows with the weight
        of their map, and `product.spread(biases, y)` gives the bias of its map for each row of y.
        """
        y = product(x.astype(self.precision.compute), self.computed(self.weight))
        return y + product.spread(self.computed(self.bias), y) if self.cfg.bias else y


def linear_product(x: jax.Array, weight: jax.Array, num_inputs: int) -> jax.Array:
    """[..., *input_dims] by [*input_dims, *output_dims] -> [..., *output_dims], with `num_inputs` input dimensions."""
    if is_sharded():  # one matrix would mix dimensions that are sharded with others
        contracted = (tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs)))
        return lax.dot_general(x, weight, (contracted, ((), ())))
    # As one matrix: XLA for CPU copies the operands of a product over several dimensions.
    rows = x.reshape(-1, math.prod(weight.shape[:num_inputs]))
    y = rows @ weight.reshape(rows.shape[1], -1)
    return y.reshape(*x.shape[: x.ndim - num_inputs], *weight.shape[num_inputs:])
