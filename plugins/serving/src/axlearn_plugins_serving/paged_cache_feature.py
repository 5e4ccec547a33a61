"""The `paged-cache` feature, which replaces a model's caches with paged caches."""

from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import Node, get_options, node, setting
from axlearn_core.config.slots import list_slots
from axlearn_core.config.tree import children, edit_nodes, find_slots
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention_variants.expanded_latent_cache import ExpandedLatentCache
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.attention_variants.paged_latent_cache import PagedLatentCache
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole
from axlearn_plugins_transformer.paged_cache import PagedCache

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UsePagedCache(Feature):
    """Use a paged cache in every attention layer, as continuous batching requires.

    Training and checkpoints do not change, because only generation uses a cache. `page_size` is the number of tokens per page
    (default: 16). `heads_first` stores pages in the layout that CPUs read best (default: false). `store` is the storage dtype of
    keys and values, with a scale per token and head (default: the model's dtype). `expand_latents` caches the keys and values of
    latent attention instead of its latents, which takes more memory, but computes what training computes (default: false).
    `kernel` names a kernel of the `paged_attention` op to use instead of the attention's own. If the cache is already paged, only
    the given options change.
    """

    stage = "execute"
    replaces = ("model.**.kernel",)
    clears_kernel: ClassVar[bool] = True
    """Whether to reset the attention's kernel if `kernel` is None. A kernel chosen for training may not support pages."""

    page_size: int | None = setting(default=None, ge=1)
    heads_first: bool | None = None
    store: Literal["int8", "float8_e4m3fn"] | None = None
    expand_latents: bool = False
    kernel: str | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Put a paged cache into every cache slot."""
        no_match = Problem(
            path="model",
            message="paged-cache found no attention layer with a cache",
            expected="a layer with a slot `Node[KVCache]` or `Node[LatentCache]`",
            fix="remove paged-cache, or serve a model that generates text",
        )
        return edit_nodes(cfg, lambda _, part: self._replace_caches(part), no_match=no_match)

    def _replace_caches(self, part: Any) -> Any:
        values: dict[str, Any] = {}
        for name in list_slots(type(part), KVCache):
            cache = children(part)[name]
            existing = cache.store if isinstance(cache, PagedCache.Config) else None
            if None not in (existing, self.store) and existing != self.store:
                raise ConfigError(_dtype_conflict(f"{name}.store", existing, self.store))
            paged = cache if isinstance(cache, PagedCache.Config) else PagedCache.Config()
            values[name] = attrs.evolve(paged, **get_options(self, "page_size", "heads_first", "store"))
        for name in list_slots(type(part), LatentCache):
            if self.store is not None:
                raise ConfigError(_latent_dtype_problem(name, self.store))
            values[name] = self._latent_cache(children(part)[name])
        if values and isinstance(part, AttentionKernelRole) and (self.clears_kernel or self.kernel is not None):
            values["kernel"] = self.kernel
        return attrs.evolve(part, **values) if values else None

    def _latent_cache(self, cache: Any) -> Any:
        if self.expand_latents:
            pages = PagedCache.Config(heads_first=True)  # the layout with values that are smaller than the keys
            return ExpandedLatentCache.Config(kv_cache=attrs.evolve(pages, **get_options(self, "page_size")))
        paged = cache if isinstance(cache, PagedLatentCache.Config) else PagedLatentCache.Config()
        return attrs.evolve(paged, **get_options(self, "page_size"))


@node
class UseInt8Cache(UsePagedCache):
    """`paged-cache` with int8 keys and values.

    Each token and head has a float32 scale.
    """

    clears_kernel: ClassVar[bool] = False

    store: Literal["int8", "float8_e4m3fn"] | None = "int8"


@node
class UseFloat8Cache(UsePagedCache):
    """`paged-cache` with float8 (e4m3) keys and values.

    Each token and head has a float32 scale.
    """

    clears_kernel: ClassVar[bool] = False

    store: Literal["int8", "float8_e4m3fn"] | None = "float8_e4m3fn"


def has_latents(model: Node[Any]) -> bool:
    """Return True if a model's config has latent attention.

    Latent attention caches one vector per token for all heads.
    """
    return bool(find_slots(model, LatentCache))


def _latent_dtype_problem(slot: str, store: str) -> Problem:
    return Problem(
        path=slot,
        message="mla caches its latents as computed, one vector per token for all heads, and does not support a cache dtype",
        got=store,
        expected="no cache dtype",
        fix="leave it out",
    )


def _dtype_conflict(path: str, existing: Any, store: Any) -> Problem:
    names = {"int8": "cache-int8", "float8_e4m3fn": "cache-fp8"}
    return Problem(
        path=path,
        message=f"{names.get(existing, existing)} sets the cache's dtype, and {names.get(store, store)} sets a different one",
        fix="remove one of them",
    )
