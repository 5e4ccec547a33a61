"""The matrices of experts: ordinary linear maps, one for each expert, stacked.

A linear map of any kind (adapted, quantized) can be that of experts where it has a method `grouped`. The parameters are
those that it has in a dense layer, with a leading axis `experts`.

E experts, K inner and N outer dimension, M rows.
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
from axlearn_core.nn.sharding import is_sharded
from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp


class Product(Protocol):
    """What a dispatch offers to the maps of its experts.

    Attributes:
        sizes: int32 [E], how many rows each expert has, where the rows are [M, K] in the order of the experts; None where
            they are [E, ..., K].
        kernel: the implementation of the op `grouped_matmul` that the config names, if it names one.
    """

    @property
    def sizes(self) -> jax.Array | None:
        """See above."""
        ...

    @property
    def kernel(self) -> str | None:
        """See above."""
        ...

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """Each expert's rows times its matrix of [E, K, N]: [M, N] or [E, ..., N], in the dtype of `rows`."""
        ...

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """[E, N] -> for each row of `like` the values of its expert, in a shape that can be added to it."""
        ...


class ExpertProjection(Projection, Protocol):
    """A projection that can be stacked over experts; `Linear` is one."""

    def grouped(self, x: jax.Array, product: Product) -> jax.Array:
        """Applies the map of each expert to its own rows, in the order that `product` takes.

        The parameters of the module have a leading axis for the experts then.
        """
        ...


class Experts(NamedTuple):
    """The maps of all experts, or of those that a device holds.

    Attributes:
        gate: [D] -> [F], or None where the experts are not gated.
        up: [D] -> [F].
        down: [F] -> [D].
        num_experts: E.
    """

    gate: Any
    up: Any
    down: Any
    num_experts: int


@attrs.frozen(eq=False)
class GroupedProduct:
    """Of rows [M, K]: those of the first expert, then those of the second, and so on; see `Product`.

    Attributes:
        adds: whether this device adds biases, where each of several computes a part of a sum; None where it is alone.
    """

    sizes: jax.Array
    kernel: str | None = None
    adds: jax.Array | None = None

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """[M, K], [E, K, N] -> [M, N]; see `GroupedMatmulOp` for rows behind the last group."""
        return GroupedMatmulOp(rows, matrices, self.sizes).run(self.kernel)

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """[E, N] -> [M, N]."""
        repeated = jnp.repeat(values, self.sizes, axis=0, total_repeat_length=like.shape[0])
        return repeated if self.adds is None else jnp.where(self.adds, repeated, 0)


class BatchedProduct:
    """Of rows [E, ..., K]; see `Product`."""

    sizes: jax.Array | None = None
    kernel: str | None = None

    def __call__(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """[E, ..., K], [E, K, N] -> [E, ..., N]."""
        if is_sharded():
            return lax.dot_general(rows, matrices, (((rows.ndim - 1,), (1,)), ((0,), (0,))))
        flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        return (flat @ matrices).reshape(*rows.shape[:-1], matrices.shape[-1])

    def spread(self, values: jax.Array, like: jax.Array) -> jax.Array:
        """[E, N] -> [E, 1, ..., N]."""
        return lax.expand_dims(values, range(1, like.ndim - 1))


def stacked(cfg: Node[Any], count: int, *, rngs: nnx.Rngs, **offered: Any) -> Any:
    """`count` projections as one module, each parameter stacked along a leading axis `experts`.

    Raises:
        RequestError: the projection cannot stand for experts.
    """

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "experts"})
    def build_part(rngs: nnx.Rngs) -> Any:
        return cfg.build(rngs=rngs, **offered)

    module = build_part(rngs)
    name_stack_axis(module, "experts")
    if not isinstance(module, StacksMaps):
        raise RequestError(
            f"{type(cfg).__qualname__} cannot stand for the matrices of experts: what it builds has no method `grouped`\n"
            "    fix: leave it to other linear maps (by the target of the feature that put it there), or use a linear"
        )
    return module
