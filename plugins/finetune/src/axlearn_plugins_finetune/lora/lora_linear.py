"""Low-rank adaptation of a linear map (Hu et al., 2021, arXiv 2106.09685).

The adapters are attributes of the adapted map, not of a wrapper module. The map's parameters therefore keep their paths
(`query.weight`), the adapters are next to them (`query.lora_a`, `query.lora_b`), and checkpoints of the base can be loaded
unchanged. The map is built as a subclass of its own class (`with_subclass`), so that `isinstance` checks still find it.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting, with_subclass
from axlearn_core.config.node import take
from axlearn_core.contracts.capabilities import StacksMaps
from axlearn_core.nn.initializers import Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection, linear_product

_Product = Callable[[jax.Array, jax.Array], jax.Array]

ADAPTERS = ("lora_a", "lora_b")
"""Names of the adapter parameters, which are the only trained parameters."""


class LoraLinear(Layer):
    """`base(x) + alpha / rank * (x @ A) @ B` with trainable A and B.

    B is initialized to zero, so the map initially equals its base. The config builds a module whose class is a subclass of the
    base's. With the same seed, the base has the same parameters as without adapters.
    """

    @node
    class Config(Layer.Config["LoraLinear"]):
        """Config of the base and the adapters. The dtypes apply only to the adapters.

        Attributes:
            base: Projection of any kind.
            rank: Inner dimension of the product of A and B.
            alpha: Scale of the update, which is multiplied by alpha / rank.
            init: Initializer for A, scaled by the fan of all input dimensions.
        """

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        base: Node[Projection] = Linear.Config()
        rank: int = setting(default=16, ge=1)
        alpha: float = setting(default=16.0, gt=0)
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

        def build(self, **offered: Any) -> Any:
            """Build `base` with adapters, from the arguments of a projection."""
            cfg, arguments = take(self, offered)
            module = with_subclass(cfg.base, _adapted_class).build(**offered)
            module.add_adapters(cfg, axes=arguments["axes"], rngs=arguments["rngs"], inherited=arguments["precision"])
            return module


class LoraMap:
    """A mixin that adds adapters to a projection. It precedes the projection's class in the list of bases.

    Attributes:
        lora_a: A, [*input_dims, rank].
        lora_b: B, [rank, *output_dims].
        lora_inputs: Number of input dimensions.
        lora_scale: alpha / rank.
        lora_dtype: Compute dtype of the update.
    """

    lora_a: Any
    lora_b: Any
    lora_inputs: int
    lora_scale: float
    lora_dtype: str

    def add_adapters(
        self, cfg: LoraLinear.Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, inherited: Precision
    ) -> None:
        """Create the adapters for a projection that was built with these axes."""
        precision = Precision(cfg.param_dtype or inherited.params, cfg.dtype or inherited.compute)
        count = len(cfg.input_dims)
        a_shape, b_shape = (*cfg.input_dims, cfg.rank), (cfg.rank, *cfg.output_dims)
        dtype = jnp.dtype(precision.params)
        a = cfg.init.build()(_key(rngs), a_shape, dtype, in_axis=tuple(range(count)), out_axis=(count,))
        self.lora_a = nnx.Param(a, out_sharding=(*axes[:count], "rank"), eager_sharding=False)
        self.lora_b = nnx.Param(jnp.zeros(b_shape, dtype), out_sharding=("rank", *axes[count:]), eager_sharding=False)
        self.lora_inputs, self.lora_scale, self.lora_dtype = count, cfg.alpha / cfg.rank, precision.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        base: Any = super()
        return self._add_update(
            base.__call__(x), x, lambda x, a: linear_product(x, a, self.lora_inputs), _matrix_product
        )

    def _add_update(self, y: jax.Array, x: jax.Array, product_a: _Product, product_b: _Product) -> jax.Array:
        a, b = (p[...].astype(self.lora_dtype) for p in (self.lora_a, self.lora_b))
        update = product_b(product_a(x.astype(self.lora_dtype), a), b)
        return y + (self.lora_scale * update).astype(y.dtype)


class GroupedLoraMap(LoraMap):
    """Adapters for a projection that supports stacks of maps, such as those of experts."""

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `axlearn_core.nn.linear.Linear.grouped`."""
        base: Any = super()
        return self._add_update(base.grouped(x, product), x, product, product)


def is_adapted(module: object) -> bool:
    """Return whether a module is a projection with adapters."""
    return isinstance(module, LoraMap)


@functools.cache  # one class per kind of base, so that equal modules compare equal
def _adapted_class(kind: type) -> type:
    return subclass_with(GroupedLoraMap if issubclass(kind, StacksMaps) else LoraMap, kind, "WithLora")


def subclass_with(mixin: type, kind: type, suffix: str) -> type:
    """Create a subclass of `mixin` and `kind`, with the name of `kind` plus the suffix."""
    names = {"__module__": mixin.__module__, "__qualname__": f"{kind.__qualname__}{suffix}"}
    return types.new_class(f"{kind.__name__}{suffix}", (mixin, kind), exec_body=lambda body: body.update(names))


def _matrix_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return linear_product(x, weight, 1)


def _key(rngs: nnx.Rngs) -> jax.Array:
    # Do not advance the stream, so that all other parameters get the same keys as without the adapter.
    stream = rngs.params
    return jax.random.fold_in(jax.random.fold_in(stream.key[...], 0x10A), stream.count[...])
