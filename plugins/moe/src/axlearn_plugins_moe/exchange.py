"""Rows to the devices that have their experts and back, by all-to-all; inside a `shard_map`.

M rows of this device, D width, P devices that share the experts among them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Compute = Callable[[jax.Array, jax.Array], jax.Array]


def exchanged(
    rows: jax.Array, expert: jax.Array, axes: Sequence[str], devices: int, local_experts: int, run: Compute
) -> jax.Array:
    """What the experts make of the rows, each expert on its own device.

    Every device has room for all rows of all of them, because any expert may be everyone's choice; only what there is is
    sent, where the backend has a ragged all-to-all. Otherwise the room is sent.

    Args:
        rows: [M, D].
        expert: int32 [M], of each row the number of its expert, from 0 to `devices * local_experts` - 1.
        axes: the mesh axes that the experts are split over.
        devices: P.
        local_experts: how many experts each device has.
        run: [P * M, D] and the experts' numbers on this device, `local_experts` where there is no row, to [P * M, D], which is zero
            where there is no row.

    Returns:
        [M, D].
    """
    axes, count = tuple(axes), rows.shape[0]
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(jax.nn.one_hot(expert, devices * local_experts, dtype=jnp.int32), axis=0).reshape(
        devices, local_experts
    )
    send_sizes = jnp.sum(sizes, axis=1)
    start = jnp.cumsum(send_sizes) - send_sizes
    theirs = lax.all_to_all(sizes, axes, 0, 0, tiled=True)  # [P, held]: of each device, for my experts
    received, starts = jnp.sum(theirs, axis=1), lax.all_to_all(start, axes, 0, 0, tiled=True)
    place = jnp.arange(count, dtype=jnp.int32)
    ends = jnp.cumsum(theirs, axis=1)
    owner = jax.vmap(lambda end: jnp.searchsorted(end, place, side="right"))(ends).astype(jnp.int32)  # [P, M]
    sorted_rows = rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
    room = _send(sorted_rows, start, send_sizes, received, axes)
    outputs = run(room.reshape(-1, rows.shape[1]), owner.reshape(-1)).reshape(devices, count, -1)
    back = _return(outputs, received, starts, send_sizes, start, axes)
    inverse = jnp.zeros_like(order).at[order].set(place.astype(order.dtype), unique_indices=True)
    return back.at[inverse].get(unique_indices=True, mode="promise_in_bounds")


def _send(
    rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """[M, D], the rows for device p from `start[p]` on -> [P, M, D]: the rows of each device, then zeros."""
    devices, (count, width) = start.shape[0], rows.shape

    def ragged(rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array) -> jax.Array:
        room = jnp.zeros((devices * count, width), rows.dtype)
        slot = jnp.full(devices, lax.axis_index(axes) * count, jnp.int32)
        return lax.ragged_all_to_all(rows, room, start, send_sizes, slot, received, axis_name=axes).reshape(
            devices, count, -1
        )

    def dense(rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array) -> jax.Array:
        place = jnp.arange(count, dtype=jnp.int32)[None]
        index = jnp.minimum(start[:, None] + place, count - 1)
        room = jnp.where((place < send_sizes[:, None])[..., None], rows[index], 0)
        return lax.all_to_all(room, axes, 0, 0, tiled=True)

    return lax.platform_dependent(rows, start, send_sizes, received, tpu=ragged, cuda=ragged, default=dense)


def _return(
    room: jax.Array, sizes: jax.Array, to: jax.Array, back: jax.Array, start: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """The inverse of `_send`: [P, M, D] -> [M, D].

    `sizes` are of the rows for each device, `to` where they go there; `back` and `start` are of those that come from each.
    """
    devices, count, width = room.shape

    def ragged(room: jax.Array, sizes: jax.Array, to: jax.Array, back: jax.Array, start: jax.Array) -> jax.Array:
        slots = jnp.arange(devices, dtype=jnp.int32) * count
        zeros = jnp.zeros((count, width), room.dtype)
        return lax.ragged_all_to_all(room.reshape(-1, width), zeros, slots, sizes, to, back, axis_name=axes)

    def dense(room: jax.Array, sizes: jax.Array, to: jax.Array, back: jax.Array, start: jax.Array) -> jax.Array:
        rows = lax.all_to_all(room, axes, 0, 0, tiled=True)
        place = jnp.arange(count, dtype=jnp.int32)
        source = jnp.searchsorted(start + back, place, side="right").astype(jnp.int32)
        return rows[source, place - start[source]]

    return lax.platform_dependent(room, sizes, to, back, start, tpu=ragged, cuda=ragged, default=dense)
