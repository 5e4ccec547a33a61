"""All-to-all exchange: sends rows to the devices of their experts and back.

It runs inside a `shard_map`.

M rows per device, D width, P devices that share the experts.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Compute = Callable[[jax.Array, jax.Array], jax.Array]


def run_exchanged(
    rows: jax.Array, expert: jax.Array, axes: Sequence[str], devices: int, local_experts: int, run: Compute
) -> jax.Array:
    """Run the experts on the rows, each expert on its own device.

    Every device has a buffer for the rows of all devices, because all rows may choose the same expert. If the backend
    has a ragged all-to-all, only the rows themselves are sent; otherwise, whole buffers are sent.

    Args:
        rows: [M, D].
        expert: Expert of each row, int32 [M], from 0 to `devices * local_experts` - 1.
        axes: Mesh axes over which the experts are sharded.
        devices: P.
        local_experts: Experts per device.
        run: Function of the received rows [P * M, D] and their local expert indices [P * M]. Empty rows have the index
            `local_experts`. It returns [P * M, D], zero for empty rows.

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
    counts = lax.all_to_all(sizes, axes, 0, 0, tiled=True)  # [P, local_experts]: rows from each device
    received, starts = jnp.sum(counts, axis=1), lax.all_to_all(start, axes, 0, 0, tiled=True)
    place = jnp.arange(count, dtype=jnp.int32)
    ends = jnp.cumsum(counts, axis=1)
    owner = jax.vmap(lambda end: jnp.searchsorted(end, place, side="right"))(ends).astype(jnp.int32)  # [P, M]
    sorted_rows = rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
    buffer = _send(sorted_rows, start, send_sizes, received, axes)
    outputs = run(buffer.reshape(-1, rows.shape[1]), owner.reshape(-1)).reshape(devices, count, -1)
    returned = _return(outputs, received, starts, send_sizes, start, axes)
    inverse = jnp.zeros_like(order).at[order].set(place.astype(order.dtype), unique_indices=True)
    return returned.at[inverse].get(unique_indices=True, mode="promise_in_bounds")


def _send(
    rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """Send the rows [M, D], starting at `start[p]`, to device p.

    Return the rows of each device, zero-padded: [P, M, D].
    """
    devices, (count, width) = start.shape[0], rows.shape

    def ragged(rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array) -> jax.Array:
        buffer = jnp.zeros((devices * count, width), rows.dtype)
        slot = jnp.full(devices, lax.axis_index(axes) * count, jnp.int32)
        return lax.ragged_all_to_all(rows, buffer, start, send_sizes, slot, received, axis_name=axes).reshape(
            devices, count, -1
        )

    def dense(rows: jax.Array, start: jax.Array, send_sizes: jax.Array, received: jax.Array) -> jax.Array:
        place = jnp.arange(count, dtype=jnp.int32)[None]
        index = jnp.minimum(start[:, None] + place, count - 1)
        buffer = jnp.where((place < send_sizes[:, None])[..., None], rows[index], 0)
        return lax.all_to_all(buffer, axes, 0, 0, tiled=True)

    return lax.platform_dependent(rows, start, send_sizes, received, tpu=ragged, cuda=ragged, default=dense)


def _return(
    buffer: jax.Array,
    sizes: jax.Array,
    offsets: jax.Array,
    return_sizes: jax.Array,
    start: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """Invert `_send`: [P, M, D] -> [M, D].

    Args:
        buffer: [P, M, D].
        sizes: Number of rows to return to each device, int32 [P].
        offsets: Index of the first of these rows on that device, int32 [P].
        return_sizes: Number of rows that come back from each device, int32 [P].
        start: Index of the first returned row on this device, int32 [P].
        axes: Mesh axes of the exchange.
    """
    devices, count, width = buffer.shape

    def ragged(
        buffer: jax.Array, sizes: jax.Array, offsets: jax.Array, return_sizes: jax.Array, start: jax.Array
    ) -> jax.Array:
        slots = jnp.arange(devices, dtype=jnp.int32) * count
        zeros = jnp.zeros((count, width), buffer.dtype)
        return lax.ragged_all_to_all(
            buffer.reshape(-1, width), zeros, slots, sizes, offsets, return_sizes, axis_name=axes
        )

    def dense(
        buffer: jax.Array, sizes: jax.Array, offsets: jax.Array, return_sizes: jax.Array, start: jax.Array
    ) -> jax.Array:
        rows = lax.all_to_all(buffer, axes, 0, 0, tiled=True)
        place = jnp.arange(count, dtype=jnp.int32)
        source = jnp.searchsorted(start + return_sizes, place, side="right").astype(jnp.int32)
        return rows[source, place - start[source]]

    return lax.platform_dependent(buffer, sizes, offsets, return_sizes, start, tpu=ragged, cuda=ragged, default=dense)
