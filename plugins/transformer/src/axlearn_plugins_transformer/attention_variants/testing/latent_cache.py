"""The suite for layouts of caches of latents."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_transformer.attention_variants.latent_cache import SeenLatents
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Mask
from axlearn_plugins_transformer.kv_cache import build_cache
from axlearn_plugins_transformer.testing import KVCacheSuite

B, S, N, L, R = 2, 12, 4, 10, 8
"""Rows, tokens of each, query heads, numbers of a latent, of which the first R are the values."""


class LatentCacheSuite(KVCacheSuite):
    """What every layout keeps: attention through the cache is attention over everything at once.

    The tests are those of `KVCacheSuite`. Every head attends to the latents themselves, as in DeepSeek-V2 with absorbed
    projections, and the mask counts by the slots that the layout gives.

    Attributes:
        config: the layout.
        tolerance: of results in float32, relative to the norm of each array; larger for a layout that rounds.
        length: slots of the cache.
    """

    def tokens(self, dtype: str = "float32", mask: Mask | None = None, **options: Any) -> AttentionOp:
        """Attention over all tokens at once: queries [B, S, N, L], latents [B, S, 1, L] as keys, a part of them as values."""
        rng = np.random.default_rng(0)
        query, key = (jnp.asarray(rng.standard_normal((B, S, n, L), np.float32), dtype) for n in (N, 1))
        return AttentionOp(query, key, key[..., :R], mask=mask or Causal(), scale=L**-0.5, **options)

    def empty(self, dtype: str = "float32") -> Any:
        """A cache of `length` slots."""
        return build_cache(self.config).init(B, self.length, L, dtype)

    def step(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None = None) -> Any:
        """(result, new cache) of one call of the layout: the op's latents go to `slots` [B or 1, S]."""

        def attention(slots_view: SeenLatents) -> AttentionOp:
            assert slots_view.latents.shape == (B, self.length, L), "the latents of all slots"
            key = slots_view.latents[:, :, None]
            return attrs.evolve(op, key=key, value=key[..., :R], query_slots=slots, key_slots=slots_view.slots)

        return build_cache(self.config).attend(cache, op.key[:, :, 0], slots, attention, kernel)
