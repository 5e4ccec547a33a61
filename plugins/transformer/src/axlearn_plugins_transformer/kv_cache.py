"""Keys and values of the tokens seen so far: pytrees that go in and come out, in a layout that a node decides."""

from typing import Any, NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, Node, node
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.kernels.attention import AttentionOp


class Seen(NamedTuple):
    """The contents of a cache: keys and values [B, T, K, H], and the slot of each (int32 [B or 1, T])."""

    key: jax.Array
    value: jax.Array
    slots: jax.Array


class KVCache(Protocol):
    """The layout of a cache, and attention over it. Built with nothing."""

    def init(self, batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: str) -> Any:
        """An empty cache."""
        ...

    def attend(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None) -> tuple[jax.Array, Any]:
        """Writes the new keys and values, and attends to all that is in the cache.

        Slots that were never written, or are written again later, hold anything: the causal mask hides what is ahead.

        Args:
            cache: from `init` or an earlier call.
            op: attention of the new tokens (queries [B, S, N, H], keys and values [B, S, K, H]), with mask, scale, soft cap
                and bias, and without slots.
            slots: int32 [B or 1, S], where the new tokens go; consecutive in each row.
            kernel: the kernel that the config names, of the op that this layout runs; None takes the best one.

        Returns:
            ([B, S, N, H], the new cache).

        Raises:
            RequestError: the kernel, or this layout, does not support the call.
        """
        ...


def build_cache(cfg: Node[Any]) -> Any:
    """Builds the layout of a cache.

    Raises:
        RequestError: it cannot attend.
    """
    layout = cfg.build()
    missing = [name for name in ("init", "attend") if not callable(getattr(layout, name, None))]
    if missing:
        raise RequestError(
            f"the cache layout {type(layout).__name__} has no method `{'` and no `'.join(missing)}`\n"
            f"    got: a layout from {type(layout).__module__}\n"
            "    expected: a layout that computes attention over what it holds, not one that hands out keys and values\n"
            f"    fix: see the protocols `KVCache` and `LatentCache`; `ContiguousCache` in {__name__} is an example"
        )
    return layout


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

    def attend(
        self, cache: dict[str, jax.Array], op: AttentionOp, slots: jax.Array, kernel: str | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `KVCache`."""
        cache, slots_view = self.append(cache, op.key, op.value, slots)
        op = attrs.evolve(op, key=slots_view.key, value=slots_view.value, query_slots=slots, key_slots=slots_view.slots)
        return op.run(kernel), cache
