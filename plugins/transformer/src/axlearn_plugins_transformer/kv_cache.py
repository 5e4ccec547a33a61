"""Caches of keys and values, in a layout that a node selects.

Caches are pytrees that are passed in and returned.
"""

from typing import Any, NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, Node, node
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.attention import AttentionOp


class CacheContents(NamedTuple):
    """The contents of a cache.

    Keys and values are [B, T, K, H], and their slots are int32 [B or 1, T].
    """

    key: jax.Array
    value: jax.Array
    slots: jax.Array


class KVCache(Protocol):
    """The layout of a cache, and attention over it. It is built without arguments."""

    def spec(self, num_kv_heads: int, head_dim: int, dtype: str, window: int | None = None) -> Any:
        """Return a pytree of `CacheEntry`: the arrays of the cache.

        Args:
            num_kv_heads: K.
            head_dim: H.
            dtype: Dtype of the keys and values.
            window: Number of keys that a query attends to, or None for all.
        """
        ...

    def attend(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None) -> tuple[jax.Array, Any]:
        """Write the new keys and values, and attend to the contents of the cache.

        Slots after the new tokens may contain arbitrary values; the causal mask hides them.

        Args:
            cache: Arrays of `spec`, from an earlier call or all zero.
            op: Attention of the new tokens (queries [B, S, N, H], keys and values [B, S, K, H]), with mask, scale, soft
                cap and bias, but without slots.
            slots: Slots of the new tokens, int32 [B or 1, S], consecutive in each row.
            kernel: Kernel for the op of this layout. None selects the best one.

        Returns:
            ([B, S, N, H], new cache).

        Raises:
            RequestError: The kernel or the layout does not support the call.
        """
        ...


def build_cache(cfg: Node[Any]) -> Any:
    """Build the layout of a cache.

    Raises:
        RequestError: The layout does not have `spec` and `attend` methods.
    """
    layout = cfg.build()
    missing = [name for name in ("spec", "attend") if not callable(getattr(layout, name, None))]
    if missing:
        raise RequestError(
            f"the cache layout {type(layout).__name__} has no method `{'` and no `'.join(missing)}`\n"
            f"    got: a layout from {type(layout).__module__}\n"
            "    expected: a layout that computes attention over its contents, not one that returns keys and values\n"
            f"    fix: see the protocols `KVCache` and `LatentCache`; `ContiguousCache` in {__name__} is an example"
        )
    return layout


class ContiguousCache(Configurable):
    """One array per row, with slots in order."""

    @node
    class Config(Configurable.Config["ContiguousCache"]):
        """A config without settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, num_kv_heads: int, head_dim: int, dtype: str, window: int | None = None) -> dict[str, CacheEntry]:
        """Return the entries of keys and values, which are stored per token."""
        entry = CacheEntry(per="token", shape=(num_kv_heads, head_dim), dtype=dtype, window=window)
        return {"key": entry, "value": entry}

    def append(
        self, cache: dict[str, jax.Array], key: jax.Array, value: jax.Array, slots: jax.Array
    ) -> tuple[dict[str, jax.Array], CacheContents]:
        """Write keys and values to the slots, which are consecutive in each row."""

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(old.dtype)
            if slots.shape[0] == 1:
                return lax.dynamic_update_slice_in_dim(old, new, slots[0, 0], axis=1)
            return jax.vmap(lambda o, n, s: lax.dynamic_update_slice_in_dim(o, n, s, axis=0))(old, new, slots[:, 0])

        cache = {"key": write(cache["key"], key), "value": write(cache["value"], value)}
        return cache, CacheContents(**cache, slots=jnp.arange(cache["key"].shape[1], dtype=jnp.int32)[None])

    def attend(
        self, cache: dict[str, jax.Array], op: AttentionOp, slots: jax.Array, kernel: str | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Write the new tokens and attend; see `KVCache`."""
        cache, slots_view = self.append(cache, op.key, op.value, slots)
        op = attrs.evolve(op, key=slots_view.key, value=slots_view.value, query_slots=slots, key_slots=slots_view.slots)
        return op.run(kernel), cache
