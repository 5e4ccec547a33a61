"""A stack of equal layers: one copy of the layer's code, run by a scan or unrolled."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import constrain


class StackLayer(Protocol):
    """A layer that can be stacked. Built with `input_dim`, `rngs`, `precision`."""

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and this layer's cache -> ([B, S, D], the new cache)."""
        ...

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        ...


class LayerStack(Protocol):
    """Makes the layers and runs them."""

    def init(self, make: Callable[[nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """The layers as one module, each parameter stacked along a leading axis `layers`."""
        ...

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other. `cache` holds an entry per layer."""
        ...


def unstack(layers: Any, num_layers: int) -> Any:
    """Stacked layers as an `nnx.List` of separate ones: for decoding, where slicing weights at every step is slow."""
    graph, state = nnx.split(layers)
    return nnx.List([nnx.merge(graph, part) for part in _slices(state, num_layers)])


def _slices(state: Any, count: int) -> list[Any]:
    # lax.split and not indexing: its gradient is one concatenation instead of a padded sum per layer.
    leaves, tree = jax.tree.flatten(state)
    split = [[lax.squeeze(part, (0,)) for part in lax.split(leaf, (1,) * count, axis=0)] for leaf in leaves]
    return [tree.unflatten([parts[i] for parts in split]) for i in range(count)]


class Stack(Configurable):
    """Runs layers by a scan (compiles once, whatever their number) or unrolled (lets the compiler see all of them).

    Parameters are stacked in both modes, so that the mode is a matter of execution and checkpoints do not depend on it.
    """

    @node
    class Config(Configurable.Config["Stack"]):
        """`remat` says what the backward pass keeps of each layer; None keeps what it needs."""

        mode: Literal["scan", "unrolled"] = "scan"
        remat: Node[Remat] | None = None

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, make: Callable[[nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs) -> Any:
        """The layers as one module, each parameter stacked along a leading axis `layers`."""

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Any:
            return make(rngs)

        return stacked(rngs)

    def __call__(self, layers: Any, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Runs them one after the other. With a cache (an entry per layer) they are always unrolled."""
        if isinstance(layers, nnx.List):
            graph, states = nnx.split(layers[0])[0], [nnx.split(layer)[1] for layer in layers]
            scanned = None
        else:
            graph, scanned = nnx.split(layers)
            if self.cfg.mode == "scan" and cache is None:
                states = ()
            else:
                states, scanned = _slices(scanned, jax.tree.leaves(scanned)[0].shape[0]), None

        def run(x: jax.Array, state: Any, cache: Any = None) -> tuple[Any, Any]:
            with summaries.collect() as found:
                x, cache = nnx.merge(graph, state)(
                    constrain(x, "batch", "sequence", "activation_embed"), context, cache
                )
            return x, (cache, found.losses, found.summaries)

        if self.cfg.remat is not None and cache is None:
            run = self.cfg.remat.build().wrap(run, in_loop=scanned is not None)
        if scanned is not None:
            x, (_, losses, reported) = lax.scan(run, x, scanned)
            summaries.add_stacked(losses, reported)
            return x, None
        new, found = [], []
        for i, state in enumerate(states):
            x, (entry, *values) = run(x, state, None if cache is None else cache[i])
            new.append(entry)
            found.append(values)
        if found:
            summaries.add_stacked(*jax.tree.map(lambda *v: jax.numpy.stack(v), *found))
        return x, None if cache is None else tuple(new)
