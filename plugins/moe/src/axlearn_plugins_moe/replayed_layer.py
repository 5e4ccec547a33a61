"""A layer whose routers replay recorded experts, and whose cache records the experts of each token.

The layer is built as a subclass of its own class, so its parameters keep their paths.
"""

import functools
import types
from typing import Any, ClassVar

import jax

from axlearn_core.config import REQUIRED, Configurable, Node, find, interface, node, setting, with_subclass
from axlearn_core.config.node import take
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Context
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.replay import EXPERTS, Replay, use_replay
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.paged_cache import PagedSlots, write_slots
from axlearn_plugins_transformer.stack import StackLayer

LAYER = "layer"
"""Key of the cache of the layer itself."""


class ReplayedLayer(Configurable):
    """Any layer of a decoder, with replay of experts.

    If the batch has an entry `layers.experts`, int [B, S, L, K] for L layers, the routers use these experts and compute only their
    weights. With a paged cache, the cache of the layer records the experts of each token.
    """

    @node
    class Config(Configurable.Config["ReplayedLayer"]):
        """The layer.

        Attributes:
            layer: The layer.
            top_k: Number K of experts of a token.
            use: Whether to use the recorded experts. If False, the layer only counts the tokens whose experts differ.
        """

        wraps: ClassVar[tuple[str, ...]] = (LAYER,)

        input_dim: int = interface(default=REQUIRED)
        layer: Node[StackLayer] = REQUIRED
        top_k: int = setting(default=REQUIRED, ge=1)
        use: bool = True

        def build(self, **offered: Any) -> Any:
            """Build `layer` with replay, from the arguments of a layer."""
            cfg, _ = take(self, offered)
            counts = {experts.top_k for experts in find(cfg.layer, MixtureOfExperts.Config).values()}  # type: ignore[attr-defined]
            if counts - {cfg.top_k}:
                raise ConfigError(
                    Problem(
                        path="top_k",
                        message="a layer with replay of experts records another number of experts than its tokens use",
                        got=str(cfg.top_k),
                        expected=", ".join(map(str, sorted(counts))),
                        fix="apply router-replay after the settings of the experts",
                    )
                )
            layer = with_subclass(cfg.layer, _replaying_class).build(**offered)
            layer.replayed_experts, layer.uses_replay = cfg.top_k, cfg.use
            return layer


class Replays:
    """A mixin that adds replay to a layer. It precedes the layer's class in the list of bases.

    Attributes:
        replayed_experts: Number of experts of a token.
        uses_replay: Whether the routers use the recorded experts.
    """

    replayed_experts: int
    uses_replay: bool

    def cache_spec(self) -> Any:
        """Add the record of the experts to the cache of the layer, if it has pages."""
        base: Any = super()
        spec = base.cache_spec()
        sizes = [entry.page_size for entry in jax.tree.leaves(spec) if entry.per == "page"]
        if not sizes:
            return spec
        shape = (sizes[0], self.replayed_experts)
        return {
            LAYER: spec,
            EXPERTS: CacheEntry(per="page", shape=shape, dtype="int16", page_size=sizes[0], record=EXPERTS),
        }

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        base: Any = super()
        records = isinstance(cache, dict) and EXPERTS in cache
        replay = Replay(context.layer_inputs.get(EXPERTS), self.uses_replay)
        with use_replay(replay):
            x, new = base.__call__(x, context, cache[LAYER] if records else cache)
        if not records:
            return x, new
        pages = cache[EXPERTS]
        if replay.chosen is not None and isinstance(context.slots, PagedSlots):
            pages = write_slots(pages, replay.chosen.reshape(-1, self.replayed_experts), context.slots.write)
        return x, {LAYER: new, EXPERTS: pages}


@functools.cache  # one class per kind of layer, so that equal modules compare equal
def _replaying_class(kind: type) -> type:
    names = {"__module__": Replays.__module__, "__qualname__": f"{kind.__qualname__}WithReplay"}
    return types.new_class(f"{kind.__name__}WithReplay", (Replays, kind), exec_body=lambda body: body.update(names))
