"""Files of weights: the shards of arrays, in pieces that are read and checked one by one.

    weights/0.bin     what process 0 wrote: pieces of at most `PIECE` bytes, in C order, one after the other
    weights/0.json    its index: for each array its shape, dtype, and its pieces: box, offset, size and hash

Each process writes the shards that it holds, each shard once. Readers on any mesh read the pieces that overlap their own
shards, and nothing else.
"""

import hashlib
import json
import math
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

PIECE = 16 * 2**20
PREFIXES = ("params.", "variables.", "learner.ema.")
"""The parts of a training state that weights are made of: what the model holds, and averages of it."""
Box = tuple[tuple[int, int], ...]
"""(begin, end) along each axis."""


def is_weight(path: str) -> bool:
    """Whether an array of a training state belongs to the files of weights."""
    return path.startswith(PREFIXES)


@attrs.frozen
class Piece:
    """A box of an array in a file.

    Attributes:
        file: the name of the file, beside the index.
        offset: its first byte there.
        start: its first index along each axis of the array.
        shape: its sizes.
        sha256: of its bytes.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str

    @property
    def box(self) -> Box:
        """Its place in the array."""
        return tuple((a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@attrs.frozen
class StoredArray:
    """One array, in pieces."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """The size of all pieces."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class ShardWriter:
    """Writes this process's shards of arrays. Orbax waits for it on every process before a checkpoint is complete.

    See `orbax.checkpoint.experimental.v1.StatefulCheckpointable`.
    """

    def __init__(self, arrays: Mapping[str, jax.Array]):
        self.arrays = arrays

    async def save(self, directory: Any) -> Awaitable[None]:
        """Copies the shards to the host; what it returns writes them."""
        shards = {path: list(_own_shards(x)) for path, x in self.arrays.items()}
        for _, data in (shard for found in shards.values() for shard in found):
            data.copy_to_host_async()
        described = {p: {"shape": list(x.shape), "dtype": str(x.dtype)} for p, x in self.arrays.items()}
        # Copies, because the state may be donated once this returns.
        copies = {p: [(start, np.array(data, order="C")) for start, data in found] for p, found in shards.items()}
        self.arrays = {}

        async def write() -> None:
            write_shards(Path(await directory.await_creation()), jax.process_index(), described, copies)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Not used: `axlearn_core.checkpoint.stream` reads."""
        raise NotImplementedError


def _own_shards(array: jax.Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(start, data) of the shards that this process writes."""
    if array.is_fully_addressable and jax.process_index() > 0:
        return  # every process has all of it
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(s.start or 0 for s in shard.index), shard.data


def write_shards(
    directory: Path,
    process: int,
    described: Mapping[str, Mapping[str, Any]],
    shards: Mapping[str, Sequence[tuple[tuple[int, ...], np.ndarray]]],
) -> None:
    """Writes one process's file, then its index. Raises `OSError`."""
    name, offset, arrays = f"{process}.bin", 0, {}
    with (directory / name).open("wb", buffering=0) as file:
        for path, found in shards.items():
            pieces = []
            for start, data in found:
                for at, shape in pieces_of(data.shape, data.dtype.itemsize):
                    box = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
                    view = np.ascontiguousarray(data[box]).reshape(-1).view(np.uint8).data
                    _write_whole(file, view)
                    begin = [a + b for a, b in zip(start, at, strict=True)]
                    pieces.append([offset, begin, list(shape), hashlib.sha256(view).hexdigest()])
                    offset += len(view)
            arrays[path] = {**described[path], "pieces": pieces}
        os.fsync(file.fileno())
    (directory / f"{process}.json").write_text(json.dumps({"file": name, "arrays": arrays}), encoding="utf-8")


def _write_whole(file: Any, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def pieces_of(
    shape: Sequence[int], itemsize: int, limit: int = PIECE
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of boxes of at most `limit` bytes (or one element), each contiguous in C order."""
    shape = tuple(shape)
    if not shape or math.prod(shape) * itemsize <= limit:
        yield (0,) * len(shape), shape
        return
    rows = limit // (math.prod(shape[1:]) * itemsize)
    for begin in range(0, shape[0], max(rows, 1)):
        if rows:
            yield (begin, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])
        else:
            yield from (((begin, *s), (1, *n)) for s, n in pieces_of(shape[1:], itemsize, limit))


def parse_index(data: bytes) -> dict[str, StoredArray]:
    """The arrays of one index. Raises `ValueError`, `KeyError` or `TypeError` where it is damaged."""
    body = json.loads(data)
    return {
        path: StoredArray(
            path,
            tuple(info["shape"]),
            info["dtype"],
            tuple(Piece(body["file"], at, tuple(start), tuple(shape), sha) for at, start, shape, sha in info["pieces"]),
        )
        for path, info in body["arrays"].items()
    }


def merge_indices(indices: Sequence[Mapping[str, StoredArray]]) -> dict[str, StoredArray]:
    """The arrays of all processes' indices: of each, the pieces of all."""
    merged: dict[str, StoredArray] = {}
    for path, array in (item for index in indices for item in index.items()):
        earlier = merged.get(path)
        merged[path] = attrs.evolve(earlier, pieces=earlier.pieces + array.pieces) if earlier else array
    return merged
