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
from axlearn_core.nn.sharding import constrain, is_sharded

WEIGHT_FIRST_ROWS = 224
"""Up to how many rows a transposed weight is the first factor: XLA for CPU reads that one as it stands, and copies the second."""


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

    transposed = False
    """Whether `weight` is the matrix [outputs, inputs]; see `transpose`."""
    column_parallel = gathers_outputs = False
    """Whether devices share the outputs alone, and whether each then gets all of them; see `split_outputs`."""

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        count = len(cfg.input_dims)
        shape = (*cfg.input_dims, *cfg.output_dims)
        self.weight = self.parameter(rngs, cfg.init, shape, axes, fan_in=range(count), fan_out=range(count, len(shape)))
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), cfg.output_dims, tuple(axes)[count:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        count = len(self.cfg.input_dims)
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        if self.column_parallel:
            x = constrain(x, *(None,) * x.ndim)
        if is_sharded() and not self.transposed:
            contracted = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
            y = lax.dot_general(x, weight, (contracted, ((), ())))
        else:  # As one matrix: XLA for CPU copies the operands of a product over several dimensions.
            rows = x.reshape(-1, math.prod(self.cfg.input_dims))
            if self.transposed:
                y = _product_with_transposed(rows, weight)
            else:
                y = rows @ weight.reshape(rows.shape[1], -1)
            y = y.reshape(*x.shape[:-count], *self.cfg.output_dims)
        if self.gathers_outputs:  # split first: with one constraint XLA gathers the weight instead
            leading = (None,) * (y.ndim - len(self.cfg.output_dims))
            y = constrain(y, *leading, *self.weight.get_metadata("out_sharding")[count:])
            y = constrain(y, *(None,) * y.ndim)
        return y + expand_to(self.computed(self.bias), y.ndim) if self.cfg.bias else y

    def split_outputs(self, axis: str) -> None:
        """Splits the weight over devices by its first output dimension, as the logical axis `axis` is split; inputs are gathered.

        Outputs are gathered where they were not split before. For programs that do not train, and whose sums must not depend on
        the number of devices.
        """
        inputs, outputs = len(self.cfg.input_dims), len(self.cfg.output_dims)
        self.column_parallel, self.gathers_outputs = True, self.weight.get_metadata("out_sharding")[-outputs] == "embed"
        self.weight.set_metadata(out_sharding=(*(None,) * inputs, axis, *(None,) * (outputs - 1)))

    def transpose(self) -> None:
        """Stores the weight as the matrix [outputs, inputs], for programs on CPUs that do not train.

        It is split over devices by the first dimension of the outputs and of the inputs.

        XLA for CPU multiplies 2 to 64 rows with it in 0.6 to 0.8 of the time, 200 in 0.95, and one or hundreds in 1 to 1.05.
        """
        rows = math.prod(self.cfg.input_dims)
        outputs = len(self.cfg.output_dims)
        axes = self.weight.get_metadata("out_sharding")  # of a layer of a stack, behind the names of the stack
        self.weight.set_metadata(out_sharding=(axes[-outputs], axes[-outputs - len(self.cfg.input_dims)]))
        self.weight.set_value(self.weight[...].reshape(rows, -1).T)
        self.transposed = True

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """What each of a stack of these maps makes of its own rows: `product(x, weights)` multiplies rows with the weight
        of their map, and `product.spread(biases, y)` gives the bias of its map for each row of y.
        """
        y = product(x.astype(self.precision.compute), self.computed(self.weight))
        return y + product.spread(self.computed(self.bias), y) if self.cfg.bias else y


def _product_with_transposed(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """[R, inputs] by [outputs, inputs] -> [R, outputs]."""
    if rows.shape[0] > WEIGHT_FIRST_ROWS:
        return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())))
    # Without the barriers XLA takes the transposes into the product, and the weight comes second again.
    columns = lax.optimization_barrier(rows.T)
    return lax.optimization_barrier(weight @ columns).T
