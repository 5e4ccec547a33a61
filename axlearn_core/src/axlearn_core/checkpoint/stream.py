"""Read sharded arrays from pieces in storage. Each piece is read once, verified, and copied to its shards."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.manifest import STATE, WEIGHTS
from axlearn_core.checkpoint.shards import Box, Piece, StoredArray, merge_indices, parse_index
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

ALIGNMENT = 64
"""Alignment, in bytes, of host buffers that JAX can use on CPUs without a copy."""


class DamagedError(Exception):
    """A file is damaged. Callers add the name of the checkpoint."""


def read_index(
    storage: Storage, root: str, files: Mapping[str, Mapping[str, Any]], folder: str = WEIGHTS
) -> dict[str, StoredArray]:
    """Read the index of a folder in a checkpoint. Return the folder's arrays keyed by path.

    Args:
        storage: Storage of the checkpoint.
        root: Folder of the checkpoint, with a trailing `/`.
        files: Files that the checkpoint's manifest lists.
        folder: `WEIGHTS` or `NON_WEIGHTS`.

    Raises:
        DamagedError: If an index is damaged.
    """
    indices = []
    for name in sorted(n for n in files if n.startswith(folder) and n.endswith(".json")):
        try:
            data = storage.read(f"{root}{name}")
        except StorageError as error:
            raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error
        if (digest := hashlib.sha256(data).hexdigest()) != files[name]["sha256"]:
            raise DamagedError(f"{name}: got sha256 {digest[:16]}, expected {files[name]['sha256'][:16]}")
        indices.append(parse_index(data))
    return merge_indices(indices)


def read_arrays(
    storage: Storage,
    folder: str,
    arrays: Mapping[str, StoredArray],
    shardings: Mapping[str, Sharding | None],
    *,
    verify: bool = True,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the path and value of each array. Host memory holds one array at a time, in addition to the results.

    Args:
        storage: Storage of the files.
        folder: Folder of the files, with a trailing `/`.
        arrays: Arrays to read.
        shardings: Sharding of each array by path. None means the default device.
        verify: Verify the hash of each piece.

    Raises:
        DamagedError: If a piece is damaged or missing.
    """
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for path, array in arrays.items():
            sharding = shardings[path] or SingleDeviceSharding(jax.local_devices()[0])
            yield path, _read_array(storage, folder, array, sharding, pool, verify)


def _read_array(
    storage: Storage, folder: str, array: StoredArray, sharding: Sharding, pool: ThreadPoolExecutor, verify: bool
) -> jax.Array:
    places = {d: _box(index, array.shape) for d, index in sharding.addressable_devices_indices_map(array.shape).items()}
    dtype = jnp.dtype(array.dtype)
    buffers = [_Buffer(box, _aligned_buffer(_sizes(box), dtype)) for box in dict.fromkeys(places.values())]
    copies = [(piece, [b for b in buffers if _overlap(piece.box, b.box) is not None]) for piece in array.pieces]
    read = _Reader(storage, folder, array.path, dtype, verify)
    for _ in pool.map(lambda copy: read(*copy), [copy for copy in copies if copy[1]]):
        pass
    overlaps = [_overlap(piece.box, b.box) for piece, blocks in copies for b in blocks]
    filled = sum(math.prod(_sizes(box)) for box in overlaps if box is not None)
    if filled != sum(b.data.size for b in buffers):
        raise DamagedError(f"{array.path}: some of its pieces are missing")
    data_by_box = {b.box: b.data for b in buffers}
    kind = sharding.memory_kind
    shards = [jax.device_put(data_by_box[b], SingleDeviceSharding(d, memory_kind=kind)) for d, b in places.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def spread_sharding(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """Return a sharding for reading an array, in which each replica reads only a part of it.

    If the shape cannot be split evenly, or if the array is in host memory, each replica reads its entire shard.
    """
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return sharding
    if sharding.memory_kind not in (None, jax.local_devices()[0].default_memory().kind):
        return sharding
    spec = [s if isinstance(s, tuple) else (() if s is None else (s,)) for s in sharding.spec]
    axes = [*spec, *[()] * (len(shape) - len(spec))]
    used = {axis for names in axes for axis in names}
    for axis, size in sharding.mesh.shape.items():
        if axis in used or size == 1:
            continue
        for dim, names in enumerate(axes):
            if shape[dim] % (size * math.prod(sharding.mesh.shape[n] for n in names)) == 0:
                axes[dim] = (*names, axis)
                break
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


@attrs.frozen(eq=False)
class _Buffer:
    box: Box
    data: np.ndarray


@attrs.frozen(eq=False)
class _Reader:
    """Reads one piece into the buffers that overlap it."""

    storage: Storage
    folder: str
    path: str
    dtype: Any
    verify: bool

    def __call__(self, piece: Piece, buffers: Sequence[_Buffer]) -> None:
        target = _contiguous(piece, buffers)
        data = np.empty(piece.shape, self.dtype) if target is None else target
        view = data.reshape(-1).view(np.uint8).data
        name = f"{STATE}/{self.folder.rpartition(f'{STATE}/')[2]}{piece.file}"
        try:
            self.storage.read_into(f"{self.folder}{piece.file}", piece.offset, view)
        except StorageError as error:
            raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error
        if self.verify and (digest := hashlib.sha256(view).hexdigest()) != piece.sha256:
            end = piece.offset + len(view)
            raise DamagedError(
                f"{name}: {self.path}, bytes {piece.offset} to {end}: got sha256 {digest[:16]}, "
                f"expected {piece.sha256[:16]}"
            )
        if target is None:
            for buffer in buffers:
                if (overlap := _overlap(piece.box, buffer.box)) is not None:
                    buffer.data[_get_slices(overlap, buffer.box)] = data[_get_slices(overlap, piece.box)]


def _contiguous(piece: Piece, buffers: Sequence[_Buffer]) -> np.ndarray | None:
    """Return a view for reading a piece without copying. Return None unless the piece is contiguous in a single buffer."""
    if len(buffers) != 1 or _overlap(piece.box, buffers[0].box) != piece.box:
        return None
    part = buffers[0].data[(*_get_slices(piece.box, buffers[0].box), ...)]
    return part if part.flags.c_contiguous else None


def _aligned_buffer(shape: Sequence[int], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _box(index: Any, shape: Sequence[int]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def _overlap(one: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(a >= b for a, b in both) else both


def _get_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in an array that covers `outer`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))
