"""Experts on several devices: what each device computes, and what the devices send one another.

Inside `over_devices` every device sees its own part of the arrays. Gradients come by differentiating the same
collectives: gathered tokens and weights have their gradients scattered, each to the device that it belongs to.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.nn import sharding
from axlearn_plugins_moe.routing import Routing

Local = Callable[[jax.Array, Routing, Any, jax.Array | None], jax.Array]


class _Axes:
    """The mesh axes of each kind of dimension, as the mesh rules in force have them."""

    def __init__(self, x: jax.Array, experts: Any, *, by_row: bool):
        placement: Any = sharding.placement()
        self.mesh, self._rules = placement.mesh, placement.rules
        used: set[str] = set()
        self.batch = self._take("batch", x.shape[0], used)
        self.sequence = () if by_row else self._take("sequence", x.shape[1], used)
        used = set()
        self.experts = self._take("experts", experts.up.shape[0], used)
        self.embed = self._take("embed", experts.up.shape[1], used)
        self.mlp = self._take("mlp", experts.up.shape[2], used)

    def _take(self, name: str, size: int, used: set[str]) -> tuple[str, ...]:
        axes = tuple(a for a in self._rules.get(name, ()) if a not in used and self.mesh.shape[a] > 1)
        if size % math.prod(self.mesh.shape[a] for a in axes):
            return ()
        used.update(axes)
        return axes


def over_devices(local: Local, x: jax.Array, routing: Routing, experts: Any) -> jax.Array:
    """Runs `local` on every device for its own experts and the tokens of all devices that share the experts.

    Args:
        local: `(x, routing, experts, first) -> [b, s, D]`, the part of the sum that these experts give; `first` is the
            number of the first of them.
        x: [B, S, D].
        routing: of all tokens.
        experts: matrices [E, D, F] and [E, F, D].

    Returns:
        [B, S, D], the sum over all experts.
    """
    length, by_row = x.shape[1], routing.token is not None
    axes = _Axes(x, experts, by_row=by_row)
    tokens = PartitionSpec(axes.batch or None, axes.sequence or None)
    lists = PartitionSpec(axes.batch or None) if by_row else PartitionSpec(axes.batch or None, None, *tokens[1:])
    into = PartitionSpec(*(a or None for a in (axes.experts, axes.embed, axes.mlp)))
    matrices = type(experts)(None if experts.gate is None else into, into, PartitionSpec(into[0], into[2], into[1]))
    exchange = tuple(a for a in axes.experts if a in axes.batch)
    summed = tuple(a for a in axes.experts if a not in exchange) + axes.mlp

    def run(x: jax.Array, routing: Routing, experts: Any) -> jax.Array:
        if axes.embed:
            dims = type(experts)(1, 1, 2)
            experts = type(experts)(
                *(
                    None if m is None else lax.all_gather(m, axes.embed, axis=dim, tiled=True)
                    for m, dim in zip(experts, dims, strict=True)
                )
            )
        if exchange:
            x, routing = jax.tree.map(lambda a: lax.all_gather(a, exchange, axis=0, tiled=True), (x, routing))
        routing = jax.tree.map(lambda a: a.reshape(a.shape[0], -1), routing)
        first = lax.axis_index(axes.experts) * experts.up.shape[0] if axes.experts else None
        y = local(x, routing, experts, first)
        y = lax.psum(y, summed) if summed else y
        return lax.psum_scatter(y, exchange, scatter_dimension=0, tiled=True) if exchange else y

    if not by_row:  # [B, K, S], so that a device gets the choices of its own positions
        routing = jax.tree.map(lambda a: a.reshape(a.shape[0], -1, length), routing)
    routed = jax.tree.map(lambda _: lists, routing)
    mapped = jax.shard_map(run, mesh=axes.mesh, in_specs=(tokens, routed, matrices), out_specs=tokens, check_vma=False)
    return mapped(x, routing, experts)
