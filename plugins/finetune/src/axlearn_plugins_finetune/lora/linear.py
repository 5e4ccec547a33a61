"""Low-rank adaptation of a linear map (Hu et al., 2021, arXiv 2106.09685).

The adapters are attributes of the adapted map itself, not of something around it: its own parameters keep their paths
(`query.weight`), with `query.lora_a` and `query.lora_b` beside them. So checkpoints of the base need no translation.
"""

import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.config.node import take
from axlearn_core.nn.initializers import Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import is_sharded

ADAPTERS = ("lora_a", "lora_b")
"""The names of the parameters that are trained."""


class LoraLinear(Layer):
    """`base(x) + alpha / rank * (x @ A) @ B`, where only A and B are meant to be trained.

    B starts at zero, so that the map is exactly its base at first. Building the config gives the module of `base` with
    the adapters added to it; with the same seed, its own parameters are those that it has without them.
    """

    @node
    class Config(Layer.Config["LoraLinear"]):
        """The map to adapt, and the adapters; the dtypes are those of the adapters alone.

        Attributes:
            base: a projection of any kind.
            rank: the width between A and B.
            alpha: the update is scaled by alpha / rank.
            init: of A, scaled by the fan of all input dimensions.
        """

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        base: Node[Projection] = Linear.Config()
        rank: int = setting(default=16, ge=1)
        alpha: float = setting(default=16.0, gt=0)
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

        def build(self, **offered: Any) -> Any:
            """The module of `base`, adapted. Offered what any projection is."""
            cfg, rest = take(self, offered)
            return adapt(
                cfg.base.build(**offered), cfg, axes=rest["axes"], rngs=rest["rngs"], inherited=rest["precision"]
            )


def adapt(
    base: Any, cfg: LoraLinear.Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, inherited: Precision
) -> Any:
    """Adds the adapters to a projection that was built with these axes. `base` itself is changed and returned."""
    precision = Precision(cfg.param_dtype or inherited.params, cfg.dtype or inherited.compute)
    count = len(cfg.input_dims)
    dtype = jnp.dtype(precision.params)
    a = cfg.init.build()(_key(rngs), (*cfg.input_dims, cfg.rank), dtype, in_axis=tuple(range(count)), out_axis=(count,))
    b = jnp.zeros((cfg.rank, *cfg.output_dims), dtype)
    base.__class__ = _adapted_class(type(base))
    base.lora_a = nnx.Param(a, out_sharding=(*axes[:count], "rank"), eager_sharding=False)
    base.lora_b = nnx.Param(b, out_sharding=("rank", *axes[count:]), eager_sharding=False)
    base.lora_inputs, base.lora_scale, base.lora_dtype = count, cfg.alpha / cfg.rank, precision.compute
    return base


def is_adapted(module: Any) -> bool:
    """Whether a module is a projection with adapters."""
    return all(hasattr(module, name) for name in (*ADAPTERS, "lora_scale"))


@functools.cache  # one class for each kind of base, so that equal modules stay equal
def _adapted_class(kind: Any) -> type:
    """`kind` with what every adapted projection has beside it.

    lora_a       [*input_dims, rank]
    lora_b       [rank, *output_dims]
    lora_inputs  how many input dimensions there are
    lora_scale   alpha / rank
    lora_dtype   what the update is computed in
    """

    def __call__(self: Any, x: jax.Array) -> jax.Array:
        y = kind.__call__(self, x)
        a, b = (p[...].astype(self.lora_dtype) for p in (self.lora_a, self.lora_b))
        update = _product(_product(x.astype(self.lora_dtype), a, self.lora_inputs), b, 1)
        return y + (self.lora_scale * update).astype(y.dtype)

    def grouped(self: Any, x: jax.Array, product: Any) -> jax.Array:
        y = kind.grouped(self, x, product)
        a, b = (p[...].astype(self.lora_dtype) for p in (self.lora_a, self.lora_b))
        update = product(product(x.astype(self.lora_dtype), a), b)
        return y + (self.lora_scale * update).astype(y.dtype)

    # Only what can be a stack of maps as it is can be one with adapters.
    methods = {"__call__": __call__, **({"grouped": grouped} if hasattr(kind, "grouped") else {})}
    # With no other base: Python lets a module change its class to one of the same layout only.
    names = {"__module__": __name__, "__qualname__": f"{kind.__qualname__}WithLora", **methods}
    return types.new_class(f"{kind.__name__}WithLora", (kind,), exec_body=lambda body: body.update(names))


def _product(x: jax.Array, weight: jax.Array, count: int) -> jax.Array:
    # As in Linear: dimensions stay apart where they are sharded, and are one matrix where they are not.
    if is_sharded():
        contracted = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
        return lax.dot_general(x, weight, (contracted, ((), ())))
    inner = math.prod(weight.shape[:count])
    y = x.reshape(-1, inner) @ weight.reshape(inner, -1)
    return y.reshape(*x.shape[: x.ndim - count], *weight.shape[count:])


def _key(rngs: nnx.Rngs) -> jax.Array:
    # Takes no key out of the stream: every other parameter gets the one that it gets without the adapter.
    stream = rngs.params
    return jax.random.fold_in(jax.random.fold_in(stream.key[...], 0x10A), stream.count[...])
