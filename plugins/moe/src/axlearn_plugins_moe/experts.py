"""Projections of experts: ordinary linear maps, stacked along a leading `experts` axis.

Any linear map (adapted, quantized) with a `grouped` method can serve as an expert projection. Its parameters have the
same names as in a dense layer.

E experts, K input dimension, N output dimension, M rows.
"""

from typing import Any, NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import Node
from axlearn_core.contracts.capabilities import StacksMaps
from axlearn_core.errors import RequestError
from axlearn_core.nn.axis_names import name_stack_axis
from axlearn_core.nn.linear import Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import is_sharded
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
from axlearn_plugins_transformer.kernels.gated_linear_unit import (
    Activation,
    ActivationFunction,
    GatedForm,
    activation_function,
    gated_form,
)

MAPS = ("gate", "up", "down")
"""Names of the projections of `Experts`."""


class Product(Protocol):
    """The matrix multiplication that a dispatch passes to its experts' projections.

    Attributes:
        sizes: Rows per expert, int32 [E], if the rows are [M, K] sorted by expert. None if the rows are [E, ..., K].
        kernel: Implementation of the `grouped_matmul` op, or None to select the best one.
    """

    @property
    def sizes(self) -> jax.Array | None:
        """Rows per expert; see the class."""
        ...

    @property
    def kernel(self) -> str | None:
        """Implementation of the op; see the class."""
        ...

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """Multiply each expert's rows by its matrix of [E, K, N].

        Return [M, N] or [E, ..., N], in the dtype of `rows`.
        """
        ...

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """Repeat the values [E, N] for each row of `like`.

        The result broadcasts with these rows.
        """
        ...


class ExpertProjection(Projection, Protocol):
    """A projection that can be stacked over experts, such as `Linear`."""

    def grouped(self, x: jax.Array, product: Product) -> jax.Array:
        """Apply each expert's projection to its rows, which are laid out as `product` describes.

        The parameters of the module have a leading `experts` axis.
        """
        ...


class Experts(NamedTuple):
    """All experts, or the experts on one device.

    Attributes:
        gate: Projection [D] -> [F], or None if the experts are not gated.
        up: Projection [D] -> [F].
        down: Projection [F] -> [D].
        num_experts: E.
        activation: Activation function of the hidden rows.
        form: How to combine the gate and up projections, or None; see `GatedForm`.
        weigh_inputs: Multiply the input of an expert by the routing weight, instead of its output.
    """

    gate: Any
    up: Any
    down: Any
    num_experts: int
    activation: Activation | Node[ActivationFunction]
    form: Node[GatedForm] | None = None
    weigh_inputs: bool = False

    def hidden(self, rows: jax.Array, product: Product) -> jax.Array:
        """Compute the input of the down projection for rows that are laid out as `product` describes."""
        up, activation = tag(self.up.grouped(rows, product), "mlp_up"), activation_function(self.activation)
        if self.gate is None:
            return tag(activation(up), "mlp_hidden")
        gate = tag(self.gate.grouped(rows, product), "mlp_gate")
        return tag(gated_form(self.form)(gate, up, activation), "mlp_hidden")


@attrs.frozen(eq=False)
class GroupedProduct:
    """The multiplication for rows [M, K] that are sorted by expert; see `Product`.

    Attributes:
        sizes: Rows per expert, int32 [E].
        kernel: Implementation of the `grouped_matmul` op, or None to select the best one.
        adds_bias: Whether this device adds the bias, if several devices each compute a partial sum. None for one device.
        covers_rows: Whether every row belongs to a group. If not, the rows after the last group belong to other devices.
    """

    sizes: jax.Array
    kernel: str | None = None
    adds_bias: jax.Array | None = None
    covers_rows: bool = True

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """Multiply [M, K] by [E, K, N] to [M, N].

        See `GroupedMatmulOp` for rows after the last group.
        """
        return GroupedMatmulOp(rows, matrices, self.sizes).run(self.kernel)

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """Repeat [E, N] to [M, N], with zeros in the rows after the last group."""
        repeated = jnp.repeat(values, self.sizes, axis=0, total_repeat_length=like.shape[0])
        if (
            not self.covers_rows
        ):  # the gradients of these rows are unspecified, and must not reach the last expert's bias
            belongs = jnp.arange(like.shape[0]) < jnp.sum(self.sizes)
            repeated = jnp.where(belongs[:, None], repeated, 0)
        return repeated if self.adds_bias is None else jnp.where(self.adds_bias, repeated, 0)


class BatchedProduct:
    """The multiplication for rows [E, ..., K]; see `Product`."""

    sizes: jax.Array | None = None
    kernel: str | None = None

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """Multiply [E, ..., K] by [E, K, N] to [E, ..., N]."""
        if is_sharded():
            return lax.dot_general(rows, matrices, (((rows.ndim - 1,), (1,)), ((0,), (0,))))
        flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        return (flat @ matrices).reshape(*rows.shape[:-1], matrices.shape[-1])

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """Expand [E, N] to [E, 1, ..., N]."""
        return lax.expand_dims(values, range(1, like.ndim - 1))


def build_stacked(cfg: Node[Any], count: int, *, rngs: nnx.Rngs, **offered: Any) -> Any:
    """Build `count` projections as one module whose parameters have a leading `experts` axis.

    Args:
        cfg: Config of one projection.
        count: Number of experts.
        rngs: Random streams, split among the experts.
        **offered: Additional arguments for `cfg.build`.

    Raises:
        RequestError: The projection has no `grouped` method.
    """

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "experts"})
    def build_part(rngs: nnx.Rngs) -> Any:
        return cfg.build(rngs=rngs, **offered)

    module = build_part(rngs)
    name_stack_axis(module, "experts")
    if not isinstance(module, StacksMaps):
        raise RequestError(
            f"{type(cfg).__qualname__} cannot be used for experts: the module that it builds has no method `grouped`\n"
            "    fix: use `linear` for the experts, or narrow the target of the feature that set this projection"
        )
    return module
