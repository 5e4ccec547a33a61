"""A stack of layers, run by a scan or unrolled.

A scan compiles each kind of layer once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from axlearn_core.compose.functions import share_code
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.config.roles import StackRole
from axlearn_core.errors import RequestError
from axlearn_core.nn import padding, summaries, variables
from axlearn_core.nn.axis_names import name_stack_axis
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.alternate import LayerPattern, find_pattern, layer_configs
from axlearn_plugins_transformer.cache_spec import check_returned
from axlearn_plugins_transformer.layer_roles import SequentialRole
from axlearn_plugins_transformer.stack_layers import (
    KindVariables,
    LayerGroup,
    Layers,
    MixedLayers,
    RepeatCache,
    StackedCache,
    VariableRecord,
    split_inputs,
    split_rows,
    stack_inputs,
    write_variables,
)


class StackLayer(Protocol):
    """A layer that can be stacked.

    It is built with `input_dim`, `rngs` and `precision`.
    """

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        ...

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `KeepsCache`."""
        ...


MakeLayer = Callable[[Node[Any], nnx.Rngs], Any]
"""(config of a layer, rngs) -> layer."""


class LayerStack(Protocol):
    """Builds the layers and runs them."""

    def init(self, make: MakeLayer, layer: Node[Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """Build the layers as one module.

        The parameters are stacked along a leading `layers` axis.
        """
        ...

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Run the layers in order, each within `padding.use_context(context)`.

        `cache` has an entry per layer.
        """
        ...


def unstack(layers: Any, num_layers: int) -> nnx.List:
    """Split stacked layers into separate ones.

    Decoding uses separate layers because slicing weights at every step is slow.
    """
    parts = Layers.from_module(layers, num_layers)
    rows = [iter(split_rows(state, parts.kinds.count(kind))) for kind, state in enumerate(parts.states)]
    return nnx.List([nnx.merge(parts.graphs[kind], next(rows[kind])) for kind in parts.kinds])


def each_layer(layers: Any, num_layers: int) -> Sequence[Any]:
    """Return, for each layer, a module of its kind.

    The module's parameters may belong to several layers.
    """
    if isinstance(layers, MixedLayers):
        return [layers.select_kind(kind) for kind in layers.kinds]
    return layers if isinstance(layers, nnx.List) else [layers] * num_layers


def _no_view(primitive: Any, *_: Any, **__: Any) -> bool:
    # A loop saves every residual separately, including every view of an array that several linear maps read.
    return primitive.name not in ("reshape", "squeeze")


class Stack(Configurable):
    """Runs layers with a scan or unrolled.

    A scan compiles each kind of layer once. Unrolling lets the compiler optimize across layers. Parameters are stacked
    in both modes, so checkpoints do not depend on the mode. If `Alternate` creates several kinds of layers, each kind
    has its own stack of parameters. The scan then runs over the shortest repeating period of kinds, and layers before
    and after the repeats are unrolled.
    """

    @node
    class Config(Configurable.Config["Stack"], StackRole, SequentialRole):
        """Execution settings. They do not change the parameters or the results.

        Attributes:
            mode: Run a scan over the layers, or unroll them.
            remat: What to save from each layer for the backward pass. None saves all residuals.
        """

        mode: Literal["scan", "unrolled"] = setting(default="scan", kind="execution")
        remat: Node[Remat] | None = setting(default=None, kind="execution")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, make: MakeLayer, layer: Node[Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """Build the layers as one module.

        The parameters are stacked along a leading `layers` axis.
        """
        configs = layer_configs(layer, num_layers)
        distinct = list(dict.fromkeys(configs))
        kinds = [distinct.index(cfg) for cfg in configs]

        def build_kind(cfg: Node[Any], count: int) -> Any:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def build_layer(rngs: nnx.Rngs) -> Any:
                return make(cfg, rngs)

            layers = build_layer(rngs)
            name_stack_axis(layers, "layers")
            return layers

        layers = [build_kind(cfg, kinds.count(kind)) for kind, cfg in enumerate(distinct)]
        return layers[0] if len(layers) == 1 else MixedLayers(layers, kinds)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Run the layers in order.

        With a cache that has an entry per layer, they are always unrolled. With a `StackedCache`, they run as a scan.
        """
        x, cache, updates = self.run(Layers.from_module(layers), x, context, cache)
        write_variables(layers, updates)
        return x, cache

    def run(
        self, layers: Layers, x: jax.Array, context: Context, cache: Any = None
    ) -> tuple[jax.Array, Any, KindVariables]:
        """Run the layers as a pure function.

        Return the output, the new cache, and the variables that they wrote.
        """
        remat = None if self.cfg.remat is None or cache is not None else self.cfg.remat.build()
        shared_code = cache is not None and isinstance(x, Tracer)
        layer = functools.cache(functools.partial(_layer, layers.graphs, context, remat, shared_code))
        stacked = isinstance(cache, StackedCache)
        unrolled = not stacked and (self.cfg.mode == "unrolled" or cache is not None)
        separate = (*cache.leading, *cache.trailing) if stacked else cache
        repeated: Any = None
        first = [layers.graphs.index(graph) for graph in layers.graphs]  # separate layers of one kind have equal graphs
        inputs = split_inputs(context.layer_inputs, len(layers.kinds))
        carry: Carry = x, dict(context.shared)
        entries, reports, record = [], [], VariableRecord(layers.separate)
        for part in layers.group(LayerPattern(0, len(layers.kinds), 1) if unrolled else find_pattern(layers.kinds)):
            if part.scan_states is not None:
                repeats = jax.tree.leaves(part.scan_states)[0].shape[0]
                row_inputs = [next(inputs) for _ in range(repeats * len(part.kinds))]
                carry, repeated, results = _scan(
                    layer, part, carry, stack_inputs(row_inputs, repeats), cache.repeated if stacked else None
                )
                reports += [report for report, _ in results]
                record.add_repeats(part.kinds, [values for _, values in results])
            for kind, state in part.layers:
                carry, (entry, report, values) = layer(first[kind])(
                    carry, state, next(inputs), None if separate is None else separate[len(entries)]
                )
                entries.append(entry)
                reports.append(report)
                record.add(kind, values)
        if remat is not None:
            remat.check()
        summaries.add_layers(reports)
        x, shared = carry
        context.shared.update(shared)
        new: Any = None if cache is None else tuple(entries)
        if stacked:
            count = len(cache.leading)
            new = StackedCache(new[:count], cache.repeated if repeated is None else repeated, new[count:])
        return x, new, record.collect()


Carry = tuple[jax.Array, dict[str, Any]]
"""The output of a layer, and the values that it and earlier layers shared."""
LayerInputs = dict[str, jax.Array]
"""`Context.layer_inputs`."""


def _scan(
    layer: Callable[..., Any], part: LayerGroup, carry: Carry, inputs: Sequence[LayerInputs], caches: Any = None
) -> tuple[Carry, Any, list[Any]]:
    """Scan over the repeats of a group.

    Return the last carry, the new caches (see `StackedCache.repeated`) and, for each kind in a repeat, its stacked results.
    """
    if caches is not None:
        return _scan_with_caches(layer, part, carry, inputs, caches)

    def body(carry: Carry, repeat: Any) -> tuple[Carry, list[Any]]:
        (states, inputs), names = repeat, set(carry[1])
        rows, results = part.rows(states), []
        for kind, layer_inputs in zip(part.kinds, inputs, strict=True):
            carry, (_, *result) = layer(kind, True)(carry, next(rows[kind]), layer_inputs)
            results.append(tuple(result))
        if set(carry[1]) != names:
            raise _SharesMore(jax.tree.map(lambda value: (value.shape, value.dtype), carry[1]))
        return carry, results

    try:
        carry, results = lax.scan(body, carry, (part.scan_states, inputs))
        return carry, None, results
    except _SharesMore as error:
        # The trace has shown that each read follows a write within a repeat, so no layer reads these zeros.
        zeros = {name: _zeros(value) for name, value in error.shapes.items() if name not in carry[1]}
        carry, results = lax.scan(body, (carry[0], {**zeros, **carry[1]}), (part.scan_states, inputs))
        return carry, None, results


def _scan_with_caches(
    layer: Callable[..., Any], part: LayerGroup, carry: Carry, inputs: Sequence[LayerInputs], caches: Any
) -> tuple[Carry, Any, list[Any]]:
    """Scan as `_scan` does. The caches are part of the carry, so that XLA updates them in place."""
    repeats = jax.tree.leaves(part.scan_states)[0].shape[0]

    def body(state: tuple[Carry, Any], repeat: Any) -> tuple[tuple[Carry, Any], list[Any]]:
        (carry, caches), (states, inputs, index) = state, repeat
        rows, results, new = part.rows(states), [], []
        for kind, layer_inputs, cache in zip(part.kinds, inputs, caches, strict=True):
            entry = RepeatCache(cache, index, repeats)
            carry, (pages, *result) = layer(kind)(carry, next(rows[kind]), layer_inputs, entry)
            new.append(pages)
            results.append(tuple(result))
        if carry[1]:
            raise RequestError(
                f"steps cannot read the stacked weights of layers that share values\n    got: {sorted(carry[1])}\n"
                "    fix: set runner.layers=separate"
            )
        return (carry, tuple(new)), results

    pages = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), caches)
    indices = jnp.arange(repeats, dtype=jnp.int32)
    (carry, pages), results = lax.scan(body, (carry, pages), (part.scan_states, inputs, indices))
    return carry, jax.tree.map(lambda x, new: new.reshape(x.shape), caches, pages), results


class _SharesMore(Exception):
    """Layers share values that were not shared before the scan."""

    def __init__(self, shapes: dict[str, Any]):
        super().__init__()
        self.shapes = shapes


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(*s), shapes, is_leaf=lambda s: isinstance(s, tuple) and len(s) == 2)


def _layer(
    graphs: Sequence[Any], context: Context, remat: Remat | None, shared_code: bool, kind: int, in_loop: bool = False
) -> Callable[..., Any]:
    """Return the function for a kind of layer.

    Its signature is `(carry, arrays, layer_inputs, cache) -> (carry, (cache, (losses, summaries), variables))`. With
    `shared_code`, the code of a kind is traced and lowered once, each layer calls it, and XLA inlines the calls.
    """

    def run(carry: Carry, state: Any, layer_inputs: LayerInputs, cache: Any = None) -> tuple[Any, Any]:
        x, shared = carry
        row = dataclasses.replace(context, layer_inputs=layer_inputs, shared=dict(shared))
        old_values = variables.get_values(state)
        module = nnx.merge(graphs[kind], state, copy=True)
        repeat = cache if isinstance(cache, RepeatCache) else None
        if repeat is not None:
            cache, row = repeat.pages, dataclasses.replace(row, slots=repeat.select(row.slots))
        with summaries.collect(module) as collected, padding.use_context(row):
            x, returned = module(constrain(x, "batch", "residual_sequence", "activation_embed"), row, cache)
        if cache is not None:
            check_returned(module, cache, returned)
        results = returned, (collected.losses, collected.summaries), variables.written(module, old_values)
        return (x, row.shared), results

    if shared_code:
        return share_code(run)
    if remat is None:
        return jax.checkpoint(run, policy=_no_view, prevent_cse=False) if in_loop else run
    return remat.wrap(run, in_loop=in_loop)
