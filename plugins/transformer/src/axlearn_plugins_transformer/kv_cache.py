"""Keys and values of the tokens seen so far: pytrees that go in and come out, in a layout that a node decides."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node


class Seen(NamedTuple):
    """What attention reads: keys and values [B, T, K, H], and the slot of each (int32 [B or 1, T])."""

    key: jax.Array
    value: jax.Array
    slots: jax.Array


class KVCache(Protocol):
    """The layout of a cache. Built with nothing."""

    def init(self, batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: str) -> Any:
        """An empty cache."""
        ...

    def append(self, cache: Any, key: jax.Array, value: jax.Array, slots: jax.Array) -> tuple[Any, Seen]:
        """Puts [B, S, K, H] at consecutive slots (int32 [B or 1, S]); returns the new cache and all that is in it.

        Slots that were never written, or are written again later, hold anything: the causal mask hides what is ahead.
        """
        ...


class ContiguousCache(Configurable):
    """One array per row, slot after slot."""

    @node
    class Config(Configurable.Config["ContiguousCache"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: str) -> dict[str, jax.Array]:
        """An empty cache."""
        shape = (batch, length, num_kv_heads, head_dim)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def append(
        self, cache: dict[str, jax.Array], key: jax.Array, value: jax.Array, slots: jax.Array
    ) -> tuple[dict[str, jax.Array], Seen]:
        """Writes at the slots, which are consecutive in each row."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(old.dtype)
            if slots.shape[0] == 1:
                return lax.dynamic_update_slice_in_dim(old, new, slots[0, 0], axis=1)
            return jax.vmap(lambda o, n, s: lax.dynamic_update_slice_in_dim(o, n, s, axis=0))(old, new, slots[:, 0])

        cache = {"key": put(cache["key"], key), "value": put(cache["value"], value)}
        return cache, Seen(**cache, slots=jnp.arange(cache["key"].shape[1], dtype=jnp.int32)[None])
