"""Read sharded arrays from pieces in storage. Each piece is read once, verified, and copied to its shards."""

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.manifest import NON_WEIGHTS, STATE, WEIGHTS, Manifest
from axlearn_core.checkpoint.piece_index import IndexReader
from axlearn_core.checkpoint.piece_reads import PieceReads, place_pieces
from axlearn_core.checkpoint.shards import Box, DamagedError, Piece, StoredArray, merge_indices, parse_index
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

ALIGNMENT = 64
"""Alignment, in bytes, of host buffers that JAX can use on CPUs without a copy."""


class ArrayIndex:
    """Finds the pieces of a checkpoint's arrays, in format 3 or 4.

    Args:
        storage: Storage of the checkpoint.
        root: Folder of the checkpoint, with a trailing `/`.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, storage: Storage, root: str, manifest: Manifest):
        self.storage, self.root, self.manifest = storage, root, manifest
        self._reader = None if manifest.index is None else IndexReader(storage, root, manifest.index)
        self._listed: dict[str, dict[str, StoredArray]] = {}

    def find(self, boxes: Mapping[str, Collection[Box]]) -> dict[str, StoredArray]:
        """Return arrays with at least the pieces that overlap some boxes.

        Args:
            boxes: Boxes by stored path. Arrays that the checkpoint does not contain are skipped.

        Raises:
            DamagedError: If an index is damaged.
        """
        if self._reader is not None:
            return self._reader.find(boxes)
        arrays: dict[str, StoredArray] = {}
        for folder in (WEIGHTS, NON_WEIGHTS):
            if missing := boxes.keys() - arrays.keys():
                index = self._read_folder(folder)
                arrays |= {path: index[path] for path in sorted(missing) if path in index}
        return arrays

    def find_all(self) -> dict[str, StoredArray]:
        """Return all arrays with all pieces. Raise `DamagedError` if an index is damaged."""
        if self._reader is not None:
            return self._reader.find_all()
        return self._read_folder(WEIGHTS) | self._read_folder(NON_WEIGHTS)

    def _read_folder(self, folder: str) -> dict[str, StoredArray]:
        """Read the indices of all processes in format 3."""
        if folder not in self._listed:
            names = sorted(n for n in self.manifest.files if n.startswith(folder) and n.endswith(".json"))
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                self._listed[folder] = merge_indices(list(pool.map(self._read_listed, names)))
        return self._listed[folder]

    def _read_listed(self, name: str) -> dict[str, StoredArray]:
        try:
            data = self.storage.read(f"{self.root}{name}")
        except StorageError as error:
            raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error
        expected = self.manifest.files[name]["sha256"]
        if (digest := hashlib.sha256(data).hexdigest()) != expected:
            raise DamagedError(f"{name}: got sha256 {digest[:16]}, expected {expected[:16]}")
        return parse_index(data, name.removeprefix(f"{STATE}/").rpartition("/")[0] + "/")


def local_boxes(sharding: Sharding | None, shape: Sequence[int]) -> dict[Any, Box]:
    """Return the box of an array on each device of this process. A sharding of None means the default device."""
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    indices = sharding.addressable_devices_indices_map(tuple(shape))
    return {device: _box(index, shape) for device, index in indices.items()}


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
        folder: Folder that contains the files of the pieces, with a trailing `/`.
        arrays: Arrays to read.
        shardings: Sharding of each array by path. None means the default device.
        verify: Verify the hash of each piece.

    Raises:
        DamagedError: If a piece is damaged or missing.
    """
    used = {path: shardings[path] or SingleDeviceSharding(jax.local_devices()[0]) for path in arrays}
    places = {path: local_boxes(used[path], array.shape) for path, array in arrays.items()}
    boxes = {path: list(dict.fromkeys(by_device.values())) for path, by_device in places.items()}
    for path, data_by_box in read_boxes(storage, folder, arrays, boxes, verify=verify):
        kind = used[path].memory_kind
        shards = [
            jax.device_put(data_by_box[box], SingleDeviceSharding(device, memory_kind=kind))
            for device, box in places[path].items()
        ]
        yield path, jax.make_array_from_single_device_arrays(arrays[path].shape, used[path], shards)


def read_boxes(
    storage: Storage,
    folder: str,
    arrays: Mapping[str, StoredArray],
    boxes: Mapping[str, Sequence[Box]],
    *,
    verify: bool = True,
) -> Iterator[tuple[str, dict[Box, np.ndarray]]]:
    """Yield the path of each array, and its boxes in host memory. See `read_arrays`."""
    needed = {path: _overlapping_pieces(array, boxes[path]) for path, array in arrays.items()}
    workers = min(8, os.cpu_count() or 1)
    with PieceReads(storage, folder, place_pieces(arrays, needed)) as reads, ThreadPoolExecutor(workers) as pool:
        for path, array in arrays.items():
            yield path, _read_boxes(_Reader(reads, array, bool(folder), verify), needed[path], boxes[path], pool)


def _overlapping_pieces(array: StoredArray, boxes: Sequence[Box]) -> list[Piece]:
    return [piece for piece in array.pieces if any(_overlap(piece.box, box) is not None for box in boxes)]


def _read_boxes(
    read: "_Reader", pieces: Sequence[Piece], boxes: Sequence[Box], pool: ThreadPoolExecutor
) -> dict[Box, np.ndarray]:
    buffers = [_Buffer(box, _aligned_buffer(_sizes(box), read.dtype)) for box in boxes]
    copies = [(piece, [b for b in buffers if _overlap(piece.box, b.box) is not None]) for piece in pieces]
    for _ in pool.map(lambda copy: read(*copy), copies):
        pass
    overlaps = [_overlap(piece.box, b.box) for piece, blocks in copies for b in blocks]
    filled = sum(math.prod(_sizes(box)) for box in overlaps if box is not None)
    if filled != sum(b.data.size for b in buffers):
        raise DamagedError(f"{read.array.path}: some of its pieces are missing")
    return {b.box: b.data for b in buffers}


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
    """Reads one piece of an array into the buffers that overlap it."""

    reads: PieceReads
    array: StoredArray
    in_state: bool
    verify: bool

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.array.dtype)

    def __call__(self, piece: Piece, buffers: Sequence[_Buffer]) -> None:
        target = _contiguous(piece, buffers)
        data = np.empty(piece.shape, self.dtype) if target is None else target
        view = data.reshape(-1).view(np.uint8).data
        name = f"{STATE}/{piece.file}" if self.in_state else piece.file
        try:
            self.reads.read_into(piece, view)
        except StorageError as error:
            raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error
        if self.verify and (digest := hashlib.sha256(view).hexdigest()) != piece.sha256:
            end = piece.offset + len(view)
            raise DamagedError(
                f"{name}: {self.array.path}, bytes {piece.offset} to {end}: got sha256 {digest[:16]}, "
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
