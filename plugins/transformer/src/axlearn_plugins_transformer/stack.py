"""A stack of layers: one copy of the code of each kind of layer, run by a scan or unrolled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import attrs
import jax
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.alternate import Plan, layer_configs, plan


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
        """Runs them one after the other. `cache` holds an entry per layer."""
        ...


class MixedLayers(nnx.Module):
    """Layers of several kinds: the attribute `0` holds all layers of the kind that comes first, stacked, and so on.

    Attributes:
        kinds: of each layer, which attribute holds it; its row there is the number of layers of that kind before it.
    """

    def __init__(self, stacked: Sequence[Any], kinds: Sequence[int]):
        self.kinds = tuple(kinds)
        for kind, layers in enumerate(stacked):
            setattr(self, str(kind), layers)


def unstack(layers: Any, num_layers: int) -> nnx.List:
    """Stacked layers as separate ones: for decoding, where slicing weights at every step is slow."""
    kinds, parts = _parts(layers, num_layers)
    rows = [iter(_slices(state, kinds.count(kind))) for kind, (_, state) in enumerate(parts)]
    return nnx.List([nnx.merge(parts[kind][0], next(rows[kind])) for kind in kinds])


def each_layer(layers: Any, num_layers: int) -> Sequence[Any]:
    """For each layer a module of its kind, whose parameters may be those of several layers."""
    if isinstance(layers, MixedLayers):
        return [getattr(layers, str(kind)) for kind in layers.kinds]
    return layers if isinstance(layers, nnx.List) else [layers] * num_layers


def _parts(layers: Any, num_layers: int | None = None) -> tuple[tuple[int, ...], list[tuple[Any, Any]]]:
    """The kind of each layer, and (structure, stacked parameters) of each kind."""
    if isinstance(layers, MixedLayers):
        return layers.kinds, [nnx.split(getattr(layers, str(k))) for k in range(max(layers.kinds) + 1)]
    graph, state = nnx.split(layers)
    return (0,) * (num_layers or jax.tree.leaves(state)[0].shape[0]), [(graph, state)]


def _slices(state: Any, count: int, sizes: Sequence[int] | None = None) -> list[Any]:
    # lax.split and not indexing: its gradient is one concatenation instead of a padded sum per layer.
    leaves, tree = jax.tree.flatten(state)
    split = [lax.split(leaf, sizes or (1,) * count, axis=0) for leaf in leaves]
    return [tree.unflatten([p[i] if sizes else lax.squeeze(p[i], (0,)) for p in split]) for i in range(count)]


def _no_view(primitive: Any, *_: Any, **__: Any) -> bool:
    # A loop keeps every value for its backward pass apart: also each of the views that several linear maps take of one.
    return primitive.name not in ("reshape", "squeeze")


class Stack(Configurable):
    """Runs layers by a scan (compiles each kind once, whatever their number) or unrolled (lets the compiler see all).

    Parameters are stacked in both modes, so that the mode is a matter of execution and checkpoints do not depend on it.
    Where `Alternate` makes layers of several kinds, each kind has its own stack of parameters, and the scan goes over
    the shortest period of kinds that repeats; layers before and after the repeats are unrolled.
    """

    @node
    class Config(Configurable.Config["Stack"]):
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
            def made(rngs: nnx.Rngs) -> Any:
                return make(cfg, rngs)

            return made(rngs)

        layers = [stacked(cfg, kinds.count(kind)) for kind, cfg in enumerate(distinct)]
        return layers[0] if len(layers) == 1 else MixedLayers(layers, kinds)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other. With a cache (an entry per layer) they are always unrolled."""
        remat = None if self.cfg.remat is None or cache is not None else self.cfg.remat.build()

        @functools.cache
        def layer(kind: int, in_loop: bool = False) -> Callable[..., Any]:
            def run(x: jax.Array, state: Any, cache: Any = None) -> tuple[Any, Any]:
                with summaries.collect() as found:
                    x, cache = nnx.merge(graphs[kind], state)(
                        constrain(x, "batch", "residual_sequence", "activation_embed"), context, cache
                    )
                return x, (cache, (found.losses, found.summaries))

            if remat is None:
                return jax.checkpoint(run, policy=_no_view, prevent_cse=False) if in_loop else run
            return remat.wrap(run, in_loop=in_loop)

        if isinstance(layers, nnx.List):
            graphs, states = zip(*map(nnx.split, layers), strict=True)
            runs = [Run([(i, state) for i, state in enumerate(states)])]
        else:
            kinds, parts = _parts(layers)
            graphs = [graph for graph, _ in parts]
            whole = self.cfg.mode == "unrolled" or cache is not None
            runs = _runs(kinds, [state for _, state in parts], Plan(0, len(kinds), 1) if whole else plan(kinds))
        new, reports = [], []
        for part in runs:
            if part.scanned is not None:

                def body(x: jax.Array, states: Any, part: "Run" = part) -> tuple[jax.Array, list[Any]]:
                    counts = [part.kinds.count(kind) for kind in range(len(states))]
                    rows = [iter([s] if n == 1 else _slices(s, n)) for s, n in zip(states, counts, strict=True)]
                    found = []
                    for kind in part.kinds:
                        x, (_, report) = layer(kind, True)(x, next(rows[kind]))
                        found.append(report)
                    return x, found

                x, found = lax.scan(body, x, part.scanned)
                reports += found
            for kind, state in part.layers:
                x, (entry, report) = layer(kind)(x, state, None if cache is None else cache[len(new)])
                new.append(entry)
                reports.append(report)
        if remat is not None:
            remat.check()
        summaries.add_layers(reports)
        return x, None if cache is None else tuple(new)


@attrs.frozen(eq=False)
class Run:
    """Some of the layers: unrolled ones, or repeats of the `kinds` over what each kind has, [repeats, rows, ...]."""

    layers: Sequence[tuple[int, Any]] = ()
    kinds: Sequence[int] = ()
    scanned: Any = None


def _runs(kinds: Sequence[int], states: Sequence[Any], plan: Plan) -> list[Run]:
    """The layers as a plan takes them: those before the repeats, the repeats, those after."""
    middle = plan.lead + plan.period * plan.repeats if plan.repeats > 1 else plan.lead
    period = kinds[plan.lead : plan.lead + plan.period]
    before, repeated, after = [], [], []
    for kind, state in enumerate(states):
        counts = [part.count(kind) for part in (kinds[: plan.lead], kinds[plan.lead : middle], kinds[middle:])]
        pieces = [state] * 3 if sum(counts) in counts else _slices(state, 3, counts)
        repeated.append(_grouped(pieces[1], plan.repeats) if counts[1] else None)
        before.append(iter(_slices(pieces[0], counts[0]) if counts[0] else ()))
        after.append(iter(_slices(pieces[2], counts[2]) if counts[2] else ()))
    return [
        Run([(kind, next(before[kind])) for kind in kinds[: plan.lead]]),
        Run(kinds=period, scanned=repeated if middle > plan.lead else None),
        Run([(kind, next(after[kind])) for kind in kinds[middle:]]),
    ]


def _grouped(state: Any, repeats: int) -> Any:
    """[repeats * n, ...] -> [repeats, n, ...], or [repeats, ...] where n is 1."""
    leaves = jax.tree.leaves(state)
    if leaves[0].shape[0] == repeats:
        return state
    return jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), state)
