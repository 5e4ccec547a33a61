"""The feature `paged-cache`: caches in pages, in the place of those of a model."""

from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import Node, find, node, setting
from axlearn_core.config.slots import slots_of
from axlearn_core.config.tree import children, edit_nodes, find_slots
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import window_of
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.attention_variants.paged_latent_cache import PagedLatentCache
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, WindowRole
from axlearn_plugins_transformer.paged_cache import PagedCache

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UsePagedCache(Feature):
    """Caches in pages that any request can own, in every attention: what continuous batching computes with.

    Training is the same, and so are checkpoints: a cache is only used to generate. `page_size` is how many tokens a page has
    room for; with `heads_first` they are stored as CPUs read them best. `store` is the dtype of keys and values in it, with a
    scale for each token and head. `kernel` names a kernel of the op `paged_attention`, in the place of the attention's own.
    """

    stage = "execute"
    clears_kernel: ClassVar[bool] = True
    """Whether an attention's own kernel goes where `kernel` is None: what fits training may not read pages."""

    page_size: int = setting(default=16, ge=1)
    heads_first: bool = False
    store: Literal["int8", "float8_e4m3fn"] | None = None
    kernel: str | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Fills every slot for a cache."""
        nothing = Problem(
            path="model",
            message="paged-cache finds no attention that keeps a cache",
            expected="a layer with a slot `Node[KVCache]` or `Node[LatentCache]`",
            fix="leave paged-cache out, or serve a model that generates text",
        )
        return edit_nodes(cfg, lambda _, part: self._pages(part), nothing=nothing)

    def _pages(self, part: Any) -> Any:
        values: dict[str, Any] = {}
        for name in slots_of(type(part), KVCache):
            cache = children(part)[name]
            before = cache.store if isinstance(cache, PagedCache.Config) else None
            if None not in (before, self.store) and before != self.store:
                raise ConfigError(_two_stores(before, self.store))
            values[name] = PagedCache.Config(page_size=self.page_size, heads_first=self.heads_first, store=self.store)
        for name in slots_of(type(part), LatentCache):
            if self.store is not None:
                raise ConfigError(_no_store(self.store))
            values[name] = PagedLatentCache.Config(page_size=self.page_size)
        if values and isinstance(part, AttentionKernelRole) and (self.clears_kernel or self.kernel is not None):
            values["kernel"] = self.kernel
        return attrs.evolve(part, **values) if values else None


@node
class UseInt8Cache(UsePagedCache):
    """`paged-cache` with keys and values in int8, and a float32 scale for each token and head."""

    clears_kernel: ClassVar[bool] = False

    store: Literal["int8", "float8_e4m3fn"] | None = "int8"


@node
class UseFloat8Cache(UsePagedCache):
    """`paged-cache` with keys and values in float8 (e4m3), and a float32 scale for each token and head."""

    clears_kernel: ClassVar[bool] = False

    store: Literal["int8", "float8_e4m3fn"] | None = "float8_e4m3fn"


def keeps_cache(part: Node[Any]) -> bool:
    """Whether a node has a slot for a cache."""
    return bool(slots_of(type(part), KVCache) or slots_of(type(part), LatentCache))


def has_latents(model: Node[Any]) -> bool:
    """Whether a model's config has latent attention, whose cache holds one vector per token for all heads."""
    return bool(find_slots(model, LatentCache))


def visible_window(model: Any) -> int | None:
    """Keys that a token sees in any layer of a model's config, itself included; None where a layer sees all."""
    if not isinstance(model, Node):
        return None
    windows: list[int | None] = []
    for part in find(model, Node).values():
        if keeps_cache(part):
            window = children(part)["window"] if isinstance(part, WindowRole) else None
            choices = (*window.first, *window.children) if isinstance(window, Alternate) else (window,)
            windows += [window_of(choice) for choice in choices]
    sizes = [window for window in windows if window is not None]
    return max(sizes) if windows and len(sizes) == len(windows) else None


def _no_store(store: str) -> Problem:
    return Problem(
        path="model",
        message="the latents of mla are cached as they are computed: one vector of a token serves all heads",
        got=store,
        expected="no other dtype",
        fix="leave it out",
    )


def _two_stores(before: Any, store: Any) -> Problem:
    names = {"int8": "cache-int8", "float8_e4m3fn": "cache-fp8"}
    return Problem(
        path="model",
        message=f"{names.get(before, before)} has set the dtype of the cache, and {names.get(store, store)} sets another one",
        fix="leave one of them out",
    )
