"""Arrays that are assembled in host memory. CPU devices use the memory without a copy, and nothing is compiled."""

import math
from typing import Any

import jax
import numpy as np

ALIGNED = 64
"""Alignment, in bytes, that JAX requires to use existing memory without a copy."""


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
                buffer[tuple(target)] = piece[tuple(source)]

    def finish(self) -> jax.Array:
        """Return the array on its devices. `put` must not be called afterwards."""
        parts = [jax.device_put(buffer, device) for device, _, buffer in self._shards]
        return jax.make_array_from_single_device_arrays(tuple(self._spec.shape), self._spec.sharding, parts)
