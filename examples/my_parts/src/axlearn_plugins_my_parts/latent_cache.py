"""The `int8-latent-cache` component."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.extend import Configurable, node
from axlearn_plugins_transformer.attention_variants.latent_cache import (
    ContiguousLatentCache,
    LatentAttentionOp,
    SeenLatents,
)


class Int8LatentCache(Configurable):
    """Stores latents as int8, with a scale for each token."""

    @node
    class Config(Configurable.Config["Int8LatentCache"]):
        """Settings for `Int8LatentCache`. There are none."""

    def __init__(self, cfg: Config):
        self.arrays = ContiguousLatentCache.Config().build()

    def spec(self, dim: int, dtype: str, window: int | None = None) -> Any:
        """Return the entries of the cache."""
        return {"latents": self.arrays.spec(dim, "int8", window), "scales": self.arrays.spec(1, "float32", window)}

    def attend(
        self, cache: Any, latents: jax.Array, slots: jax.Array, attention: LatentAttentionOp, kernel: str | None
    ) -> tuple[jax.Array, Any]:
        """Append latents and attend.

        See `axlearn_plugins_transformer.attention_variants.latent_cache.LatentCache`.
        """
        scale = jnp.max(jnp.abs(latents.astype(jnp.float32)), axis=-1, keepdims=True) / 127 + 1e-30
        integers = jnp.round(latents / scale).astype(jnp.int8)
        integers, slots_view = self.arrays.append(cache["latents"], integers, slots)
        scales, scale = self.arrays.append(cache["scales"], scale, slots)
        latents = (slots_view.latents * scale.latents).astype(latents.dtype)
        op = attention(SeenLatents(latents, slots_view.slots))
        return op.run(kernel), {"latents": integers, "scales": scales}
