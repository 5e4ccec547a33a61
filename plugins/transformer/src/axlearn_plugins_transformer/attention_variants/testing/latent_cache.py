"""The conformance suite for layouts of latent caches."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_transformer.attention_variants.latent_cache import SeenLatents
from axlearn_plugins_transformer.cache_spec import empty_cache
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Mask
from axlearn_plugins_transformer.kv_cache import build_cache
from axlearn_plugins_transformer.testing import KVCacheSuite

B, S, N, L, R = 2, 12, 4, 10, 8
"""Rows, tokens per row, query heads, size of a latent, and size of a value (the first R elements of the latent)."""


class LatentCacheSuite(KVCacheSuite):
    """Tests that attention through the cache equals attention over all tokens at once.

    The tests are those of `KVCacheSuite`. Every head attends to the latents directly, as in DeepSeek-V2 with absorbed
    projections. The mask uses the slots that the layout provides.

    Attributes:
        config: Config of the layout.
        tolerance: Relative tolerance for float32 results, in the norm of each array. Set it higher for layouts that round.
        length: Number of slots in the cache.
    """

    def tokens(self, dtype: str = "float32", mask: Mask | None = None, **options: Any) -> AttentionOp:
        """Return attention over all tokens at once.

        Queries are [B, S, N, L]. Latents [B, S, 1, L] are keys and values.
        """
        rng = np.random.default_rng(0)
        query, key = (rng.standard_normal((B, S, n, L), np.float32).astype(jnp.dtype(dtype)) for n in (N, 1))
        query, key, value = jax.device_put((query, key, key[..., :R]))
        return AttentionOp(query, key, value, mask=mask or Causal(), scale=L**-0.5, **options)

    def empty(self, dtype: str = "float32") -> Any:
        """Return an empty cache of `length` slots."""
        return empty_cache(build_cache(self.config).spec(L, dtype), B, self.length)

    def step(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None = None) -> Any:
        """Call the layout once, with the op's latents at `slots` [B or 1, S].

        Return (result, new cache).
        """

        def attention(slots_view: SeenLatents) -> AttentionOp:
            assert slots_view.latents.shape == (B, self.length, L), "the layout must pass the latents of all slots"
            key = slots_view.latents[:, :, None]
            return attrs.evolve(op, key=key, value=key[..., :R], query_slots=slots, key_slots=slots_view.slots)

        return build_cache(self.config).attend(cache, op.key[:, :, 0], slots, attention, kernel)
