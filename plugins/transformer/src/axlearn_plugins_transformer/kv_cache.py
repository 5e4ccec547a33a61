"""Caches of keys and values, in a layout that a node selects.

Caches are pytrees that are passed in and returned.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, Node, node
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer.cache_spec import CacheEntry, read_prefix, read_window
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import UNKNOWN_PREFIX, Mask, Prefix


class CacheContents(NamedTuple):
    """The contents of a cache.

    Keys and values are [B, T, K, H], and their slots are int32 [B or 1, T].
    """

    key: jax.Array
    value: jax.Array
    slots: jax.Array


class KVCache(Protocol):
    """The layout of a cache, and attention over it. It is built without arguments. See also `ReadsCache`."""

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

        Slots after the new tokens may contain arbitrary values; the mask hides them.

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


@runtime_checkable
class ReadsCache(Protocol):
    """The layout of a cache that layers without keys of their own can use."""

    def read(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None) -> jax.Array:
        """Attend as `KVCache.attend` does, to contents that an earlier layer has written, and return [B, S, N, H]."""
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


def read_cache(cfg: Node[Any], cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None = None) -> jax.Array:
    """Attend to the contents of a cache that an earlier layer has written, and return [B, S, N, H].

    Args:
        cfg: Config of the layout.
        cache: Arrays of the layout, which contain the new tokens.
        op: Attention of the new tokens; see `KVCache.attend`.
        slots: Slots of the new tokens; see `KVCache.attend`.
        kernel: Kernel for the op of this layout. None selects the best one.

    Raises:
        RequestError: The layout has no method `read`, or the kernel does not support the call.
    """
    layout = build_cache(cfg)
    if not isinstance(layout, ReadsCache):
        raise RequestError(
            f"the cache layout {type(layout).__name__} has no method `read`, which layers with shared keys and values need\n"
            f"    got: a layout from {type(layout).__module__}\n"
            f"    fix: use another layout, or add the method; `ContiguousCache` in {__name__} is an example"
        )
    return layout.read(cache, op, slots, kernel)


def cached_mask(mask: Callable[[Context], Mask]) -> Mask:
    """Return the mask of a layer for calls with a cache, with abstract arrays.

    Args:
        mask: The layer's function from a context to a mask.
    """
    results: list[Mask] = []
    slots = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    jax.eval_shape(lambda x: results.append(mask(Context(positions=x, slots=x))), slots)
    return results[0]


def declare_prefix(spec: Any, mask: Mask) -> Any:
    """Return the entries of a spec, with the size of the mask's prefix."""
    size = mask.lookahead()
    if not 0 < size < UNKNOWN_PREFIX:
        return spec
    return jax.tree.map(lambda entry: attrs.evolve(entry, prefix=int(size)), spec)


def hide_unwritten(mask: Mask, context: Context, spec: Any) -> Mask:
    """Return the mask of new tokens, without keys that are not written yet.

    Causal masks do not change. Layouts for serving hide these keys themselves.

    Args:
        mask: Mask of the layer.
        context: Context with slots.
        spec: Entries of the layer's cache.

    Raises:
        RequestError: If the mask shows keys that a later call writes, or keys that the spec allows to discard.
    """
    window, reach, size = read_window(spec), mask.reach(), mask.lookahead()
    if window is not None and (reach is None or reach > window):
        raise RequestError(
            f"attention reads keys that its cache may have discarded\n    got: the mask {mask.describe()}\n"
            f"    expected: at most the last {window} keys, the `window` of `cache_spec`\n"
            "    fix: override `mask` instead of `scores`, or override `cache_spec` too"
        )
    if size == math.inf or (size < UNKNOWN_PREFIX and size > read_prefix(spec)):
        raise RequestError(
            f"attention reads keys that a later call writes to its cache\n    got: the mask {mask.describe()}\n"
            "    expected: a mask that hides later keys, except for those of a prefix that `cache_spec` declares\n"
            "    fix: combine the mask with Causal, or override `mask` instead of `scores`"
        )
    if not size or not isinstance(context.slots, jax.Array):
        return mask
    slots = context.slots
    written = slots[:, -1] if context.real is None else slots[:, 0] - 1 + jnp.sum(context.real, axis=1, dtype=jnp.int32)
    return mask & Prefix(written + 1)


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
        cache, _ = self.append(cache, op.key, op.value, slots)
        return self.read(cache, op, slots, kernel), cache

    def read(self, cache: dict[str, jax.Array], op: AttentionOp, slots: jax.Array, kernel: str | None) -> jax.Array:
        """Attend to tokens that have been written; see `KVCache`."""
        key_slots = jnp.arange(cache["key"].shape[1], dtype=jnp.int32)[None]
        return attrs.evolve(op, **cache, query_slots=slots, key_slots=key_slots).run(kernel)
