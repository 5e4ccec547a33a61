"""A stack of layers: one copy of the code of each kind of layer, run by a scan or unrolled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
from flax import nnx
from jax import lax
from jax.core import Tracer

from axlearn_core.compose.functions import share_code
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.config.roles import StackRole
from axlearn_core.nn import padding, summaries, variables
from axlearn_core.nn.axis_names import name_stack_axis
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.alternate import Plan, layer_configs, plan
from axlearn_plugins_transformer.layer_roles import OneByOneRole
from axlearn_plugins_transformer.stacked import Layers, MixedLayers, Record, Run, Written, rows_of, write_variables


class StackLayer(Protocol):
    """A layer that can be stacked. Built with `input_dim`, `rngs`, `precision`."""

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and this layer's cache -> ([B, S, D], the new cache)."""
        ...

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        ...


Make = Callable[[Node[Any], nnx.Rngs], Any]
"""(the config of a layer, rngs) -> the layer."""


class LayerStack(Protocol):
    """Makes the layers and runs them."""

    def init(self, make: Make, layer: Node[Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """The layers as one module, each parameter stacked along a leading axis `layers`."""
        ...

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other, each within `padding.known_to_layers(context)`. `cache` holds an entry per layer."""
        ...


def unstack(layers: Any, num_layers: int) -> nnx.List:
    """Stacked layers as separate ones: for decoding, where slicing weights at every step is slow."""
    parts = Layers.of(layers, num_layers)
    rows = [iter(rows_of(state, parts.kinds.count(kind))) for kind, state in enumerate(parts.states)]
    return nnx.List([nnx.merge(parts.graphs[kind], next(rows[kind])) for kind in parts.kinds])


def each_layer(layers: Any, num_layers: int) -> Sequence[Any]:
    """For each layer a module of its kind, whose parameters may be those of several layers."""
    if isinstance(layers, MixedLayers):
        return [layers.of_kind(kind) for kind in layers.kinds]
    return layers if isinstance(layers, nnx.List) else [layers] * num_layers


def _no_view(primitive: Any, *_: Any, **__: Any) -> bool:
    # A loop keeps every value for its backward pass apart: also each of the views that several linear maps take of one.
    return primitive.name not in ("reshape", "squeeze")


class Stack(Configurable):
    """Runs layers by a scan (compiles each kind once, regardless of their number) or unrolled (lets the compiler see all).

    Parameters are stacked in both modes, so that the mode is a matter of execution and checkpoints do not depend on it.
    Where `Alternate` makes layers of several kinds, each kind has its own stack of parameters, and the scan goes over
    the shortest period of kinds that repeats; layers before and after the repeats are unrolled.
    """

    @node
    class Config(Configurable.Config["Stack"], StackRole, OneByOneRole):
        """`remat` says what the backward pass keeps of each layer; None keeps what it needs.

        Both are execution: the parameters, and what the layers compute, are the same.
        """

        mode: Literal["scan", "unrolled"] = setting(default="scan", kind="execution")
        remat: Node[Remat] | None = setting(default=None, kind="execution")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, make: Make, layer: Node[Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """The layers as one module, each parameter stacked along a leading axis `layers`."""
        configs = layer_configs(layer, num_layers)
        distinct = list(dict.fromkeys(configs))
        kinds = [distinct.index(cfg) for cfg in configs]

        def stacked(cfg: Node[Any], count: int) -> Any:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def build_layer(rngs: nnx.Rngs) -> Any:
                return make(cfg, rngs)

            layers = build_layer(rngs)
            name_stack_axis(layers, "layers")
            return layers

        layers = [stacked(cfg, kinds.count(kind)) for kind, cfg in enumerate(distinct)]
        return layers[0] if len(layers) == 1 else MixedLayers(layers, kinds)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other. With a cache (an entry per layer) they are always unrolled."""
        x, cache, written = self.run(Layers.of(layers), x, context, cache)
        write_variables(layers, written)
        return x, cache

    def run(self, layers: Layers, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any, Written]:
        """As a pure function of the layers: (what comes out, the new cache, the variables that the layers wrote)."""
        remat = None if self.cfg.remat is None or cache is not None else self.cfg.remat.build()
        shared = cache is not None and isinstance(x, Tracer)
        layer = functools.cache(functools.partial(_layer, layers.graphs, context, remat, shared))
        whole = self.cfg.mode == "unrolled" or cache is not None
        first = [layers.graphs.index(graph) for graph in layers.graphs]  # separate layers of one kind have equal graphs
        entries, reports, record = [], [], Record(layers.separate)
        for part in layers.runs(Plan(0, len(layers.kinds), 1) if whole else plan(layers.kinds)):
            if part.scanned is not None:

                def body(x: jax.Array, states: Any, part: Run = part) -> tuple[jax.Array, list[Any]]:
                    rows, results = part.rows(states), []
                    for kind in part.kinds:
                        x, (_, *result) = layer(kind, True)(x, next(rows[kind]))
                        results.append(tuple(result))
                    return x, results

                x, results = lax.scan(body, x, part.scanned)
                reports += [report for report, _ in results]
                record.add_repeats(part.kinds, [values for _, values in results])
            for kind, state in part.layers:
                x, (entry, report, values) = layer(first[kind])(
                    x, state, None if cache is None else cache[len(entries)]
                )
                entries.append(entry)
                reports.append(report)
                record.add(kind, values)
        if remat is not None:
            remat.check()
        summaries.add_layers(reports)
        return x, None if cache is None else tuple(entries), record.written()


def _layer(
    graphs: Sequence[Any], context: Context, remat: Remat | None, shared: bool, kind: int, in_loop: bool = False
) -> Callable[..., Any]:
    """`(x, arrays, cache) -> (x, (cache, (losses, summaries), variables written))`: one layer of a kind.

    With `shared`, the code of a kind is traced and lowered once, and called by each of its layers; XLA puts it in line.
    """

    def run(x: jax.Array, state: Any, cache: Any = None) -> tuple[Any, Any]:
        before = variables.values_of(state)
        module = nnx.merge(graphs[kind], state, copy=True)
        with summaries.collect() as collected, padding.known_to_layers(context):
            x, cache = module(constrain(x, "batch", "residual_sequence", "activation_embed"), context, cache)
        return x, (cache, (collected.losses, collected.summaries), variables.written(module, before))

    if shared:
        return share_code(run)
    if remat is None:
        return jax.checkpoint(run, policy=_no_view, prevent_cse=False) if in_loop else run
    return remat.wrap(run, in_loop=in_loop)
