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
    """A map from trailing input dimensions to output dimensions.

    Its parent offers `input_dims` and `output_dims` (tuples), `axes` (a logical name for each of these dimensions), `rngs`,
    and `precision`.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., *input_dims] to [..., *output_dims]."""
        ...


class Linear(Layer):
    """Linear layer, `x @ weight + bias`. Inputs and outputs may have several dimensions ([D] -> [heads, head_dim])."""

    @node
    class Config(Layer.Config["Linear"]):
        """Bias and initializer. The fan-in covers all input dimensions, and the bias starts at zero."""

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
        """Map [..., *input_dims] to [..., *output_dims]."""
        y = linear_product(x.astype(self.precision.compute), self.computed(self.weight), len(self.cfg.input_dims))
        return y + expand_to(self.computed(self.bias), y.ndim) if self.cfg.bias else y

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """Apply a stack of linear layers, such as experts, each to its group of rows.

        `product(x, weights)` multiplies each row by the weight of its layer. `product.spread(biases, y)` returns the
        bias for each row of y.
        """
        y = product(x.astype(self.precision.compute), self.computed(self.weight))
        return y + product.spread(self.computed(self.bias), y) if self.cfg.bias else y


def linear_product(x: jax.Array, weight: jax.Array, num_inputs: int) -> jax.Array:
    """Multiply [..., *input_dims] by [*input_dims, *output_dims]. `num_inputs` is the number of input dimensions."""
    if is_sharded():  # reshaping to one matrix would merge sharded dimensions with other dimensions
        contracted = (tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs)))
        return lax.dot_general(x, weight, (contracted, ((), ())))
    # Reshape to one matrix. XLA for CPU would copy the operands of a matmul over several dimensions.
    rows = x.reshape(-1, math.prod(weight.shape[:num_inputs]))
    y = rows @ weight.reshape(rows.shape[1], -1)
    return y.reshape(*x.shape[: x.ndim - num_inputs], *weight.shape[num_inputs:])
