"""Experts sharded over several devices.

Inside `run_sharded`, each device sees its local shards. Gradients come from differentiating the collectives: the
gradient of a gathered array is scattered back to the device that owns it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.nn import sharding
from axlearn_core.nn.linear import Linear
from axlearn_plugins_moe.experts import MAPS, Experts
from axlearn_plugins_moe.routing import Routing


@attrs.frozen(eq=False)
class Device:
    """The shard of the experts that one device computes.

    Attributes:
        first: Index of its first expert, or None if the device has all experts.
        adds_bias: Whether the device adds the bias. None unless the hidden dimension is sharded.
        exchange: Mesh axes over which the device sends tokens to their experts. Empty if it already has all tokens.
        devices: Number of devices along these axes.
    """

    first: jax.Array | None = None
    adds_bias: jax.Array | None = None
    exchange: tuple[str, ...] = ()
    devices: int = 1


Local = Callable[[jax.Array, Routing, Experts, Device], jax.Array]


class _Parameters:
    """The parameters of the experts' projections, and the structure to restore them."""

    def __init__(self, experts: Experts):
        maps = {n: m for n in MAPS if (m := getattr(experts, n)) is not None}
        parts = {n: nnx.split(m) for n, m in maps.items()}
        self._experts = experts
        self._graphs = {n: graph for n, (graph, _) in parts.items()}
        # A linear map casts its parameters to the compute dtype. Cast before sending, so that gradients use it too.
        self.dtypes = {n: m.precision.compute if _is_linear(m) else None for n, m in maps.items()}
        self._flat = {n: nnx.to_flat_state(state) for n, (_, state) in parts.items()}
        self.arrays = {n: [v.get_value() for _, v in flat] for n, flat in self._flat.items()}
        # A layer of a stack contains slices of the stacked parameters, but keeps the full axis names. Its own axes are the last
        # ones.
        self.axes = {
            n: [v.get_metadata()["out_sharding"][-v.get_value().ndim :] for _, v in flat]
            for n, flat in self._flat.items()
        }

    def sizes(self) -> dict[str, int]:
        """Return the size of each logical axis."""
        pairs = [(a, x) for n in self.arrays for a, x in zip(self.axes[n], self.arrays[n], strict=True)]
        return {name: size for axes, x in pairs for name, size in zip(axes, x.shape, strict=True) if name}

    def cast_for_sending(self, arrays: Mapping[str, list[jax.Array]]) -> dict[str, list[jax.Array]]:
        """Cast the arrays to the dtype in which devices send them."""
        return {
            n: [a if self.dtypes[n] is None else a.astype(self.dtypes[n]) for a in values]
            for n, values in arrays.items()
        }

    def map_arrays(self, function: Callable[..., Any], *trees: Any) -> dict[str, list[Any]]:
        """Call `function(axes, *leaves)` for each array."""
        return {
            n: [function(*leaf) for leaf in zip(axes, *(t[n] for t in trees), strict=True)]
            for n, axes in self.axes.items()
        }

    def merge(self, arrays: Mapping[str, list[jax.Array]], count: int) -> Experts:
        """Return the projections with new parameter values."""
        maps: dict[str, Any] = {}
        for n, flat in self._flat.items():
            values = [(path, v.replace(x)) for (path, v), x in zip(flat, arrays[n], strict=True)]
            maps[n] = nnx.merge(self._graphs[n], nnx.from_flat_state(values))
        return self._experts._replace(**maps, num_experts=count)


def _is_linear(module: Any) -> bool:
    return isinstance(module, Linear) and type(module).grouped is Linear.grouped


class _Axes:
    """The mesh axes of each dimension, under the current mesh rules."""

    def __init__(self, x: jax.Array, sizes: Mapping[str, int], *, splits_rows: bool):
        placement: Any = sharding.placement()
        self.mesh, self._rules = placement.mesh, placement.rules
        used: set[str] = set()
        self.batch = self._take("batch", x.shape[0], used)
        self.sequence = () if splits_rows else self._take("sequence", x.shape[1], used)
        used = set()
        self.experts = self._take("experts", sizes["experts"], used)
        self.embed = self._take("embed", sizes["embed"], used)
        self.mlp = self._take("mlp", sizes["mlp"], used)

    def _take(self, name: str, size: int, used: set[str]) -> tuple[str, ...]:
        axes = tuple(a for a in self._rules.get(name, ()) if a not in used and self.mesh.shape[a] > 1)
        if size % math.prod(self.mesh.shape[a] for a in axes):
            return ()
        used.update(axes)
        return axes

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return the partition spec of an expert parameter."""
        mesh_axes = {"experts": self.experts, "embed": self.embed, "mlp": self.mlp}
        return PartitionSpec(*(mesh_axes.get(a or "") or None for a in axes))


def run_sharded(local: Local, x: jax.Array, routing: Routing, experts: Experts, *, gather: bool = True) -> jax.Array:
    """Run `local` on every device, for its own experts.

    Each call gets the tokens of all devices that share the experts.

    Args:
        local: `(x, routing, experts, device) -> [b, s, D]`, the partial sum of these experts.
        x: [B, S, D].
        routing: Routing of all tokens.
        experts: All experts.
        gather: Gather the tokens of the devices. If False and each of the devices has different tokens, each device
            keeps its own tokens and `local` must exchange them.

    Returns:
        The sum over all experts, [B, S, D].
    """
    length, splits_rows = x.shape[1], routing.token is not None
    parameters = _Parameters(experts)
    axes = _Axes(x, parameters.sizes(), splits_rows=splits_rows)
    tokens = PartitionSpec(axes.batch or None, axes.sequence or None)
    lists = PartitionSpec(axes.batch or None) if splits_rows else PartitionSpec(axes.batch or None, None, *tokens[1:])
    exchange = tuple(a for a in axes.experts if a in axes.batch)
    summed = tuple(a for a in axes.experts if a not in exchange) + axes.mlp
    sends = bool(exchange) and not gather and exchange == axes.experts

    def gather_embed(names: tuple[str | None, ...], array: jax.Array) -> jax.Array:
        if "embed" not in names or not axes.embed:
            return array
        return lax.all_gather(array, axes.embed, axis=names.index("embed"), tiled=True)

    def run(x: jax.Array, routing: Routing, arrays: Any) -> jax.Array:
        arrays = parameters.map_arrays(gather_embed, parameters.cast_for_sending(arrays))
        if exchange and not sends:
            x, routing = jax.tree.map(lambda a: lax.all_gather(a, exchange, axis=0, tiled=True), (x, routing))
        routing = jax.tree.map(lambda a: a.reshape(a.shape[0], -1), routing)
        local_experts = experts.num_experts // math.prod(axes.mesh.shape[a] for a in axes.experts)
        device = Device(
            first=lax.axis_index(axes.experts) * local_experts if axes.experts and not sends else None,
            adds_bias=lax.axis_index(axes.mlp) == 0 if axes.mlp else None,
            exchange=exchange if sends else (),
            devices=experts.num_experts // local_experts,
        )
        y = local(x, routing, parameters.merge(arrays, local_experts), device)
        y = lax.psum(y, summed) if summed else y
        return lax.psum_scatter(y, exchange, scatter_dimension=0, tiled=True) if exchange and not sends else y

    if not splits_rows:  # [B, K, S], so that each device gets the choices of its own positions
        routing = jax.tree.map(lambda a: a.reshape(a.shape[0], -1, length), routing)
    specs = tokens, jax.tree.map(lambda _: lists, routing), parameters.map_arrays(axes.spec)
    mapped = jax.shard_map(run, mesh=axes.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(x, routing, parameters.arrays)
