"""A stack of layers, run by a scan or unrolled.

A scan compiles each kind of layer once.
"""

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
from axlearn_plugins_transformer.alternate import LayerPattern, find_pattern, layer_configs
from axlearn_plugins_transformer.layer_roles import SequentialRole
from axlearn_plugins_transformer.stack_layers import (
    KindVariables,
    LayerGroup,
    Layers,
    MixedLayers,
    VariableRecord,
    split_rows,
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

        With a cache (an entry per layer), they are always unrolled.
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
        shared = cache is not None and isinstance(x, Tracer)
        layer = functools.cache(functools.partial(_layer, layers.graphs, context, remat, shared))
        unrolled = self.cfg.mode == "unrolled" or cache is not None
        first = [layers.graphs.index(graph) for graph in layers.graphs]  # separate layers of one kind have equal graphs
        entries, reports, record = [], [], VariableRecord(layers.separate)
        for part in layers.group(LayerPattern(0, len(layers.kinds), 1) if unrolled else find_pattern(layers.kinds)):
            if part.scan_states is not None:

                def body(x: jax.Array, states: Any, part: LayerGroup = part) -> tuple[jax.Array, list[Any]]:
                    rows, results = part.rows(states), []
                    for kind in part.kinds:
                        x, (_, *result) = layer(kind, True)(x, next(rows[kind]))
                        results.append(tuple(result))
                    return x, results

                x, results = lax.scan(body, x, part.scan_states)
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
        return x, None if cache is None else tuple(entries), record.collect()


def _layer(
    graphs: Sequence[Any], context: Context, remat: Remat | None, shared: bool, kind: int, in_loop: bool = False
) -> Callable[..., Any]:
    """Return the function for a kind of layer.

    Its signature is `(x, arrays, cache) -> (x, (cache, (losses, summaries), variables))`. With `shared`, the code of a
    kind is traced and lowered once, each layer calls it, and XLA inlines the calls.
    """

    def run(x: jax.Array, state: Any, cache: Any = None) -> tuple[Any, Any]:
        old_values = variables.get_values(state)
        module = nnx.merge(graphs[kind], state, copy=True)
        with summaries.collect(module) as collected, padding.use_context(context):
            x, cache = module(constrain(x, "batch", "residual_sequence", "activation_embed"), context, cache)
        return x, (cache, (collected.losses, collected.summaries), variables.written(module, old_values))

    if shared:
        return share_code(run)
    if remat is None:
        return jax.checkpoint(run, policy=_no_view, prevent_cse=False) if in_loop else run
    return remat.wrap(run, in_loop=in_loop)
