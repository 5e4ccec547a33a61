"""The cache of latent attention: one short vector per token, for all heads together."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node


class SeenLatents(NamedTuple):
    """What latent attention reads: vectors [B, T, L], and the slot of each (int32 [B or 1, T])."""

    latents: jax.Array
    slots: jax.Array


class LatentCache(Protocol):
    """The layout of a cache of latents. Built with nothing."""

    def init(self, batch: int, length: int, dim: int, dtype: str) -> Any:
        """An empty cache."""
        ...

    def append(self, cache: Any, latents: jax.Array, slots: jax.Array) -> tuple[Any, SeenLatents]:
        """Puts [B, S, L] at consecutive slots (int32 [B or 1, S]); returns the new cache and all that is in it.

        Slots that were never written, or are written again later, hold anything: the causal mask hides what is ahead.
        """
        ...


class ContiguousLatentCache(Configurable):
    """One array per row, slot after slot."""

    @node
    class Config(Configurable.Config["ContiguousLatentCache"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, batch: int, length: int, dim: int, dtype: str) -> jax.Array:
        """An empty cache."""
        return jnp.zeros((batch, length, dim), dtype)

    def append(self, cache: jax.Array, latents: jax.Array, slots: jax.Array) -> tuple[jax.Array, SeenLatents]:
        """Writes at the slots, which are consecutive in each row."""
        latents = latents.astype(cache.dtype)
        if slots.shape[0] == 1:
            cache = lax.dynamic_update_slice_in_dim(cache, latents, slots[0, 0], axis=1)
        else:
            put = jax.vmap(lambda old, new, at: lax.dynamic_update_slice_in_dim(old, new, at, axis=0))
            cache = put(cache, latents, slots[:, 0])
        return cache, SeenLatents(cache, jnp.arange(cache.shape[1], dtype=jnp.int32)[None])
