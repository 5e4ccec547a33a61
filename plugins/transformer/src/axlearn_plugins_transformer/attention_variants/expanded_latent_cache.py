"""A cache of the keys and values that latent attention computes from its latents."""

from typing import Any

import attrs
import jax

from axlearn_core.config import Configurable, Node, node
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentAttentionOp, SeenLatents
from axlearn_plugins_transformer.kv_cache import KVCache, build_cache
from axlearn_plugins_transformer.paged_cache import PagedCache


class ExpandedLatentCache(Configurable):
    """Keys and values of every head, computed as in training.

    The cache holds N (H + P) numbers for keys and as many for values, instead of R + P, but the steps of a server compute the same
    products as training does.
    """

    @node
    class Config(Configurable.Config["ExpandedLatentCache"]):
        """Layout of the keys and values.

        Attributes:
            kv_cache: Layout of the cache, which must accept values that are smaller than the keys.
        """

        kv_cache: Node[KVCache] = PagedCache.Config(heads_first=True)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.layout = build_cache(cfg.kv_cache)

    def expanded_spec(self, num_heads: int, head_dim: int, dtype: str, window: int | None = None) -> Any:
        """Return the entries of the keys and values; see `ExpandsLatents`."""
        return self.layout.spec(num_heads, head_dim, dtype, window)

    def spec(self, dim: int, dtype: str, window: int | None = None) -> Any:
        """Raise an error, because this layout does not store vectors for all heads."""
        raise RequestError(
            "the cache layout expanded-latent-cache stores keys and values, not latents\n"
            "    fix: leave out the indexer of the attention, or use another layout"
        )

    def attend(
        self, cache: Any, latents: jax.Array, slots: Any, attention: LatentAttentionOp, kernel: str | None
    ) -> tuple[jax.Array, Any]:
        """Write the keys and values of the new latents, and attend; see `LatentCache`."""
        op = attention(SeenLatents(latents, slots))
        return self.layout.attend(cache, attrs.evolve(op, query_slots=None, key_slots=None), slots, kernel)

    def write(self, cache: Any, latents: jax.Array, slots: Any) -> Any:
        """Raise an error; see `spec`."""
        return self.spec(latents.shape[-1], str(latents.dtype))
