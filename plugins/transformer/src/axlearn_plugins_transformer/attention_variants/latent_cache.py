"""The cache of latent attention: one short vector per token, for all heads together."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node
from axlearn_plugins_transformer.kernels.attention import AttentionOp


class SeenLatents(NamedTuple):
    """The contents of a cache: vectors [B, T, L], and the slot of each (int32 [B or 1, T])."""

    latents: jax.Array
    slots: jax.Array


class LatentAttentionOp(Protocol):
    """The attention of some queries, which only the layer knows, to latents that only the cache holds."""

    def __call__(self, slots_view: SeenLatents) -> AttentionOp:
        """The op over these vectors, with the slots of queries and keys."""
        ...


class LatentCache(Protocol):
    """The layout of a cache of latents, and attention over it. Built with nothing."""

    def init(self, batch: int, length: int, dim: int, dtype: str) -> Any:
        """An empty cache."""
        ...

    def attend(
        self, cache: Any, latents: jax.Array, slots: jax.Array, attention: LatentAttentionOp, kernel: str | None
    ) -> tuple[jax.Array, Any]:
        """Writes the new vectors, and attends to all that are in the cache.

        Slots that were never written, or are written again later, hold anything: the causal mask hides what is ahead.

        Args:
            cache: from `init` or an earlier call.
            latents: [B, S, L], of the new tokens.
            slots: int32 [B or 1, S], where they go; consecutive in each row.
            attention: the attention of the new tokens to vectors at slots.
            kernel: the kernel that the config names, of the op that this layout runs; None takes the best one.

        Returns:
            ([B, S, N, V] with V by `attention`, the new cache).

        Raises:
            RequestError: the kernel, or this layout, does not support the call.
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

    def attend(
        self,
        cache: jax.Array,
        latents: jax.Array,
        slots: jax.Array,
        attention: LatentAttentionOp,
        kernel: str | None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `LatentCache`."""
        cache, slots_view = self.append(cache, latents, slots)
        return attention(slots_view).run(kernel), cache
