"""`ServingLinear`: a linear map with a weight layout for serving.

A server does not train, so it can store each weight in the layout that its processor reads fastest. Layouts are applied to a model
with separate layers. Checkpoints, adapters and the weights that a server loads keep the shapes and paths of `Linear`.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax import lax

from axlearn_core.config import Node
from axlearn_core.nn.layer import expand_to
from axlearn_core.nn.linear import Linear, linear_product
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_serving.paged_cache_feature import has_latents

WeightLayout = Literal["transposed", "column_parallel"]

WEIGHT_FIRST_ROWS = 224
"""Up to this many rows, a transposed weight is the first operand of the matmul. XLA for CPU reads the first operand in place
and copies the second."""


class ServingLinear(nnx.Module):
    """A `Linear` whose weight has a different layout.

    Attributes:
        cfg: Config of the `Linear`.
        precision: Precision of the `Linear`.
        weight: [*input_dims, *output_dims] in every layout, for layers that read the weights of their maps.
        bias: [*output_dims], if the `Linear` has a bias.
    """

    weight: Any

    def __init__(self, linear: Linear):
        self.cfg, self.precision = linear.cfg, linear.precision
        self._store(linear.weight)
        if linear.cfg.bias:
            self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., *input_dims] to [..., *output_dims]."""
        y = self._multiply(x.astype(self.precision.compute))
        return y + expand_to(self._computed(self.bias), y.ndim) if self.cfg.bias else y

    def _computed(self, variable: Any) -> jax.Array:
        return variable[...].astype(self.precision.compute)

    @abc.abstractmethod
    def _store(self, weight: Any) -> None:
        """Store the variable [*input_dims, *output_dims] in the layout of the subclass."""

    @abc.abstractmethod
    def _multiply(self, x: jax.Array) -> jax.Array:
        """Multiply [..., *input_dims] by the stored weight -> [..., *output_dims]."""


class TransposedLinear(ServingLinear):
    """A `Linear` that stores the matrix [outputs, inputs].

    The matrix is sharded by the first dimension of the outputs and of the inputs.

    Compared with `Linear`, XLA for CPU takes 0.6 to 0.8 times as long to multiply 2 to 64 rows, 0.95 times as long for 200
    rows, and 1 to 1.05 times as long for a single row or hundreds of rows.

    Attributes:
        matrix: [outputs, inputs].
    """

    def _store(self, weight: Any) -> None:
        inputs, outputs = len(self.cfg.input_dims), len(self.cfg.output_dims)
        axes = weight.get_metadata("out_sharding")  # in a stack, the stack's axes come first
        self.axes = tuple(axes[-outputs - inputs :])
        self.matrix = weight.replace(weight[...].reshape(math.prod(self.cfg.input_dims), -1).T)
        self.matrix.set_metadata(out_sharding=(axes[-outputs], axes[-outputs - inputs]))

    @property
    def weight(self) -> Any:
        """The weight in the training layout, recomputed on each access."""
        weight = self.matrix.replace(self.matrix[...].T.reshape(*self.cfg.input_dims, *self.cfg.output_dims))
        weight.set_metadata(out_sharding=self.axes)
        return weight

    def _multiply(self, x: jax.Array) -> jax.Array:
        weight = self._computed(self.matrix)
        rows = x.reshape(-1, weight.shape[1])
        if rows.shape[0] > WEIGHT_FIRST_ROWS:
            y = lax.dot_general(rows, weight, (((1,), (1,)), ((), ())))
        else:  # without the barriers, XLA folds the transposes into the matmul, and the weight becomes the second operand again
            columns = lax.optimization_barrier(rows.T)
            y = lax.optimization_barrier(weight @ columns).T
        return y.reshape(*x.shape[: x.ndim - len(self.cfg.input_dims)], *self.cfg.output_dims)


class ColumnParallelLinear(ServingLinear):
    """A `Linear` that shards its outputs and gathers its inputs.

    The first output dimension is sharded like the logical `mlp` axis.

    No device computes partial sums, so sums do not depend on the number of devices. Outputs are gathered if `Linear` does not
    shard them.
    """

    def _store(self, weight: Any) -> None:
        inputs, outputs = len(self.cfg.input_dims), len(self.cfg.output_dims)
        self.gathers_outputs = weight.get_metadata("out_sharding")[-outputs] == "embed"
        self.weight = weight.replace(weight[...])
        self.weight.set_metadata(out_sharding=(*(None,) * inputs, "mlp", *(None,) * (outputs - 1)))

    def _multiply(self, x: jax.Array) -> jax.Array:
        inputs, outputs = len(self.cfg.input_dims), len(self.cfg.output_dims)
        y = linear_product(constrain(x, *(None,) * x.ndim), self._computed(self.weight), inputs)
        if self.gathers_outputs:  # shard first: with a single constraint, XLA gathers the weight instead
            y = constrain(y, *(None,) * (y.ndim - outputs), *self.weight.get_metadata("out_sharding")[inputs:])
            y = constrain(y, *(None,) * y.ndim)
        return y


LAYOUTS: Mapping[WeightLayout, type[ServingLinear]] = {
    "transposed": TransposedLinear,
    "column_parallel": ColumnParallelLinear,
}


def lay_out_maps(model: Any, layout: WeightLayout) -> None:
    """Replace each plain `Linear` of a model with a `ServingLinear`.

    The model must have separate layers.

    Subclasses of `Linear` may compute something else, and stacks of maps (as in experts) are not called as one map. Both are
    left unchanged; `describe_kept_layouts` lists the subclasses.
    """
    served: dict[int, ServingLinear] = {}
    parents: list[Any] = [module for _, module in nnx.iter_modules(model)]
    for parent in parents:
        for name, child in list(nnx.iter_children(parent)):
            if type(child) is not Linear or _is_stack(child):
                continue
            if id(child) not in served:
                served[id(child)] = LAYOUTS[layout](child)
            if isinstance(name, int):
                parent[name] = served[id(child)]  # an `nnx.List`
            else:
                setattr(parent, str(name), served[id(child)])


def stores_transposed(model: Node[Any], devices: Sequence[Any]) -> bool:
    """Return True if `fast` mode stores the model's maps as [outputs, inputs].

    This is the case on CPUs, unless layers read the weights of their maps in each step, as latent attention does.
    """
    return devices[0].platform == "cpu" and not has_latents(model)


def choose_layout(
    model: Node[Any], devices: Sequence[Any], *, parity: bool, has_adapters: bool, stacked: bool = False
) -> WeightLayout | None:
    """Return the layout in which an engine stores the weights of linear maps, or None for that of training.

    Args:
        model: Config of the model.
        devices: Devices of the engine.
        parity: Whether steps match the training program bit for bit.
        has_adapters: Whether requests can select adapters.
        stacked: Whether steps read the stacked arrays of training.
    """
    if parity:
        return "column_parallel" if len(devices) > 1 else None
    return "transposed" if not has_adapters and not stacked and stores_transposed(model, devices) else None


def describe_kept_layouts(model: Any) -> tuple[str, ...]:
    """Describe the `Linear` subclasses that keep the training layout.

    Returns one sentence per class.
    """
    paths: dict[type, list[str]] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and type(module) is not Linear:
            paths.setdefault(type(module), []).append(".".join(map(str, path)))
    return tuple(
        maps[0]
        + (f" and {len(maps) - 1} more" if len(maps) > 1 else "")
        + f": a {kind.__name__} has its own product, so its weight keeps the layout of training"
        for kind, maps in paths.items()
    )


def _is_stack(linear: Linear) -> bool:
    return linear.weight[...].ndim > len(linear.cfg.input_dims) + len(linear.cfg.output_dims)
