"""Arrays that are assembled in host memory. CPU devices use the memory without a copy, and nothing is compiled."""

import math
from typing import Any

import jax
import numpy as np

ALIGNED = 64
"""Alignment, in bytes, that JAX requires to use existing memory without a copy."""
TILE = (1024, 8)
"""Size of a tile of a transposed piece, along the source's fastest axis and along the target's. Measured on CPUs."""
MIN_ROWS = 64
"""Minimum size of the source's fastest axis. With fewer rows, the loop over the tiles takes longer than the copy."""


def in_host_memory(sharding: Any) -> bool:
    """Return whether all shards are on CPUs of this process."""
    return jax.process_count() == 1 and all(d.platform == "cpu" for d in sharding.device_set)


class HostArray:
    """An array with one buffer per shard.

    Args:
        spec: Shape, dtype and sharding.
    """

    def __init__(self, spec: Any):
        self._spec = spec
        self._shards: list[tuple[Any, tuple[int, ...], np.ndarray]] = []  # device, first index, buffer
        for device, slices in spec.sharding.addressable_devices_indices_map(tuple(spec.shape)).items():
            ranges = [part.indices(size)[:2] for part, size in zip(slices, spec.shape, strict=True)]
            shape = tuple(end - begin for begin, end in ranges)
            size = math.prod(shape) * np.dtype(spec.dtype).itemsize
            memory = np.zeros(size + ALIGNED, np.uint8)
            skipped = -memory.ctypes.data % ALIGNED
            buffer = memory[skipped : skipped + size].view(spec.dtype).reshape(shape)
            self._shards.append((device, tuple(begin for begin, _ in ranges), buffer))

    def put(self, piece: np.ndarray, start: tuple[int, ...]) -> None:
        """Write a piece at the index `start`, in the array's dtype; `start` is padded with zeros on the right."""
        piece = piece.reshape((1,) * (len(self._spec.shape) - piece.ndim) + piece.shape)
        start = (*start, *(0,) * (piece.ndim - len(start)))
        for _, first, buffer in self._shards:
            target, source = [], []
            for begin, count, low, size in zip(start, piece.shape, first, buffer.shape, strict=True):
                lower, upper = max(begin, low), min(begin + count, low + size)
                target.append(slice(lower - low, upper - low))
                source.append(slice(lower - begin, upper - begin))
            if all(part.start < part.stop for part in target):
                copy_values(buffer[tuple(target)], piece[tuple(source)])

    def finish(self) -> jax.Array:
        """Return the array on its devices. `put` must not be called afterwards."""
        parts = [jax.device_put(buffer, device) for device, _, buffer in self._shards]
        return jax.make_array_from_single_device_arrays(tuple(self._spec.shape), self._spec.sharding, parts)


def copy_values(target: np.ndarray, source: np.ndarray) -> None:
    """Write `source` to `target`, an array of the same shape, in the dtype of `target`.

    numpy copies a transposed array with a cache miss for almost every element. Tiles are copied several times as fast.
    """
    if target.dtype == source.dtype:  # numpy copies numbers that it knows faster
        target, source = (x.view(f"u{x.dtype.itemsize}") for x in (target, source))
    last = target.ndim - 1
    strides = {abs(stride): axis for axis, stride in reversed([*enumerate(source.strides)]) if source.shape[axis] > 1}
    fast = strides[min(strides)] if strides else last
    if fast == last or target.shape[fast] < MIN_ROWS:
        target[...] = source
        return
    rows, columns = (range(0, target.shape[axis], step) for axis, step in zip((fast, last), TILE, strict=True))
    for outer in np.ndindex(*(1 if axis in (fast, last) else size for axis, size in enumerate(target.shape))):
        for begin in rows:
            for first in columns:
                tile = [slice(i, i + 1) for i in outer]
                tile[fast], tile[last] = slice(begin, begin + TILE[0]), slice(first, first + TILE[1])
                target[tuple(tile)] = source[tuple(tile)]
