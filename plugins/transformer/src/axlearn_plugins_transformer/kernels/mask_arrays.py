"""Select parts of the arrays of a mask, for kernels that process some queries or some keys at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.kernels.masks import Mask, Role, is_causal_window


def map_arrays(mask: Mask, change: Callable[[Role, jax.Array], jax.Array]) -> Mask:
    """Return the mask with `change(role, array)` in place of each array.

    Raises:
        RequestError: The roles of the arrays are unknown; see `Mask.roles`.
    """
    return jax.tree.map(change, mask.roles(), mask) if jax.tree.leaves(mask) else mask


def separate_queries(mask: Mask, rows: int, count: int) -> Mask:
    """Return the mask for `rows * count` rows of one query each, given the mask for `rows` rows of `count` queries."""

    def separate(role: Role, x: jax.Array) -> jax.Array:
        if role == "queries":
            x = jnp.broadcast_to(x, (rows, *x.shape[1:]))
            return x.reshape(rows * count, 1, *x.shape[2:])
        return x if x.shape[0] == 1 else jnp.repeat(x, count, axis=0)

    return map_arrays(mask, separate) if count > 1 else mask


def select_keys(mask: Mask, slots: jax.Array) -> Mask:
    """Return the mask for the keys at these slots, int32 [B or 1, K], given the mask for the keys at slots 0, 1, 2, ..."""

    def select(role: Role, x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, slots, axis=1, mode="clip") if role == "keys" else x

    return map_arrays(mask, select)


def select_tokens(mask: Mask, tokens: Any) -> Mask:
    """Return the mask for some rows: indices, int32 [...], or a slice. Arrays that all rows share stay as they are."""
    return jax.tree.map(lambda x: x if x.shape[0] == 1 else x[tokens], mask)


def visible_slots(mask: Mask, positions: jax.Array, slots: jax.Array, lengths: Any = None) -> jax.Array:
    """Return which keys of a cache queries see, bool [..., Q, K].

    Args:
        mask: Mask for Q rows of one query. If Q is 1, it may also be a mask for all leading dimensions.
        positions: Slots of the queries, int32 [..., Q].
        slots: Slots of the keys, int32 [..., K].
        lengths: Number of written slots, an int or int32 [..., 1]. None if the query is at the last written slot.
    """
    queries, keys = (0, positions.shape[-1]), (0, slots.shape[-1])
    if is_causal_window(mask):
        visible = mask.materialize(queries, keys, positions, slots)
    elif positions.ndim == 2 and queries[1] == 1:
        visible = select_keys(mask, slots).materialize(queries, keys, positions, slots)
    else:  # every query is a row
        flat = slots.reshape(1, -1)
        visible = select_keys(mask, flat).materialize((0, 1), keys, positions.reshape(-1, 1), flat)[:, 0]
        visible = visible.reshape(*(1,) * (positions.ndim - 1), *visible.shape)
    if mask.lookahead():
        visible &= (slots < (positions + 1 if lengths is None else lengths))[..., None, :]
    return visible
