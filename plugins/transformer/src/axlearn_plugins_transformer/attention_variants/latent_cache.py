"""Caches of latent attention: one short vector per token, shared by all heads."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.attention import AttentionOp


class SeenLatents(NamedTuple):
    """The contents of a cache: latents [B, T, L], and their slots, int32 [B or 1, T]."""

    latents: jax.Array
    slots: jax.Array


class ReadLatents(NamedTuple):
    """Reads the contents of a cache.

    Attributes:
        read: Function from row numbers int32 [R] to the latents that these rows see, [R, T, L], and their slots, int32 [1, T].
        batch: Number of rows to read at a time, or None to read all rows.
    """

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    batch: int | None = None


class LatentAttentionOp(Protocol):
    """Builds the op in which a layer's queries attend to cached latents."""

    def __call__(self, slots_view: SeenLatents) -> AttentionOp:
        """Build the op over these latents, with the slots of queries and keys."""
        ...


class LatentCache(Protocol):
    """The layout of a latent cache, and attention over it.

    It is built without arguments.
    """

    def spec(self, dim: int, dtype: str, window: int | None = None) -> Any:
        """Return a pytree of `CacheEntry` for latents of size `dim`; see `KVCache.spec`."""
        ...

    def attend(
        self, cache: Any, latents: jax.Array, slots: jax.Array, attention: LatentAttentionOp, kernel: str | None
    ) -> tuple[jax.Array, Any]:
        """Write the new latents, and attend to the contents of the cache.

        Slots after the new tokens may contain arbitrary values; the causal mask hides them.

        Args:
            cache: Arrays of `spec`, from an earlier call or all zero.
            latents: Latents of the new tokens, [B, S, L].
            slots: Slots of the new tokens, int32 [B or 1, S], consecutive in each row.
            attention: Builds the op in which the new tokens attend to latents.
            kernel: Kernel for the op of this layout. None selects the best one.

        Returns:
            ([B, S, N, V], new cache). `attention` determines V.

        Raises:
            RequestError: The kernel or the layout does not support the call.
        """
        ...

    def write(self, cache: Any, latents: jax.Array, slots: Any) -> tuple[Any, ReadLatents]:
        """Write the new latents, as `attend` does, and return the new cache and a way to read it."""
        ...


@runtime_checkable
class ExpandsLatents(Protocol):
    """A layout that stores the keys and values of every head, as training computes them.

    Its `attend` calls `attention` with the new latents, and expects an op with the keys and values of every head.
    """

    def expanded_spec(self, num_heads: int, head_dim: int, dtype: str, window: int | None = None) -> Any:
        """Return a pytree of `CacheEntry`; see `KVCache.spec`."""
        ...


class ContiguousLatentCache(Configurable):
    """One array per row, with slots in order."""

    @node
    class Config(Configurable.Config["ContiguousLatentCache"]):
        """A config without settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, dim: int, dtype: str, window: int | None = None) -> CacheEntry:
        """Return the entry of the latents, which are stored per token."""
        return CacheEntry(per="token", shape=(dim,), dtype=dtype, window=window)

    def append(self, cache: jax.Array, latents: jax.Array, slots: jax.Array) -> tuple[jax.Array, SeenLatents]:
        """Write latents to the slots, which are consecutive in each row."""
        latents = latents.astype(cache.dtype)
        if slots.shape[0] == 1:
            cache = lax.dynamic_update_slice_in_dim(cache, latents, slots[0, 0], axis=1)
        else:
            write = jax.vmap(lambda old, new, slot: lax.dynamic_update_slice_in_dim(old, new, slot, axis=0))
            cache = write(cache, latents, slots[:, 0])
        return cache, SeenLatents(cache, jnp.arange(cache.shape[1], dtype=jnp.int32)[None])

    def attend(
        self,
        cache: jax.Array,
        latents: jax.Array,
        slots: jax.Array,
        attention: LatentAttentionOp,
        kernel: str | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new latents and attend; see `LatentCache`."""
        cache, slots_view = self.append(cache, latents, slots)
        return attention(slots_view).run(kernel), cache

    def write(self, cache: jax.Array, latents: jax.Array, slots: jax.Array) -> tuple[jax.Array, ReadLatents]:
        """Write the new latents; see `LatentCache`."""
        cache, slots_view = self.append(cache, latents, slots)
        return cache, ReadLatents(lambda rows: (slots_view.latents, slots_view.slots))
