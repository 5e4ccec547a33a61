"""Files of arrays: the shards of arrays, in pieces that are written, read and checked one by one.

    weights/0-0.bin   a file of process 0: pieces of at most `PIECE` bytes, in C order, one after the other
    weights/0-1.bin   the next one, once the first has `FILE` bytes
    weights/0.json    its index: for each array its shape, dtype, and its pieces: file, offset, box and hash

Each process writes the shards that it holds, each shard once, and hashes what it writes. Readers on any mesh read the pieces
that overlap their own shards, and nothing else.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

PIECE, FILE = 16 * 2**20, 64 * 2**20
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

    def piece_bytes(self, piece: Piece) -> int:
        """The size of one piece."""
        return math.prod(piece.shape) * jnp.dtype(self.dtype).itemsize


def own_shards(array: jax.Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(start, data) of the shards that this process writes."""
    if array.is_fully_addressable and jax.process_index() > 0:
        return  # every process has all of it
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(s.start or 0 for s in shard.index), shard.data


def held_shards(array: jax.Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(start, data) of the shards that lie on this process's devices, each once."""
    shards = {tuple(s.start or 0 for s in shard.index): shard.data for shard in array.addressable_shards}
    yield from shards.items()


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


@attrs.frozen(eq=False)
class Part:
    """Bytes of one array that are to be written: its path, its box, and a view of host memory until they are."""

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    view: memoryview | None


@attrs.define(eq=False)
class BinaryFile:
    """A file of parts: hashed while a storage writes it.

    Attributes:
        hashes: of each part, once it was written.
    """

    name: str
    bytes: int = 0
    hashes: list[str] = attrs.field(factory=list)
    _parts: list[Part] = attrs.field(factory=list)
    _buffers: list[int] = attrs.field(factory=list)

    def add(self, part: Part, buffer: int) -> None:
        """Adds a part at the end; `buffer` identifies the memory that it lies in."""
        self._parts.append(part)
        self._buffers.append(buffer)
        self.bytes += part.bytes

    def release(self) -> list[int]:
        """Lets go of the memory of all parts; returns whose it was, once for each part."""
        self._parts = [attrs.evolve(part, view=None) for part in self._parts]
        buffers, self._buffers = self._buffers, []
        return buffers

    def chunks(self) -> Iterator[memoryview]:
        """What is to be written, part by part."""
        self.hashes.clear()
        for part in self._parts:
            assert part.view is not None
            self.hashes.append(hashlib.sha256(part.view).hexdigest())
            yield part.view

    def pieces(self) -> Iterator[tuple[str, list[Any]]]:
        """(path, offset, start, shape, hash) of each part, as an index has them."""
        offset = 0
        for part, digest in zip(self._parts, self.hashes, strict=True):
            yield part.path, [offset, list(part.start), list(part.shape), digest]
            offset += part.bytes


def render_index(described: Mapping[str, Mapping[str, Any]], files: Sequence[BinaryFile]) -> bytes:
    """The index of one process: arrays by path with shape and dtype, and where their pieces are in its files."""
    arrays: dict[str, Any] = {path: {**info, "pieces": []} for path, info in described.items()}
    for number, file in enumerate(files):
        for path, piece in file.pieces():
            arrays[path]["pieces"].append([number, *piece])
    sizes = [[f.name, f.bytes] for f in files]
    return json.dumps({"files": sizes, "arrays": arrays}).encode()


def parse_index(data: bytes) -> dict[str, StoredArray]:
    """The arrays of one index. Raises `ValueError`, `KeyError` or `TypeError` where it is damaged."""
    body = json.loads(data)
    names = [name for name, _ in body["files"]]
    return {
        path: StoredArray(
            path,
            tuple(info["shape"]),
            info["dtype"],
            tuple(Piece(names[n], at, tuple(start), tuple(shape), sha) for n, at, start, shape, sha in info["pieces"]),
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
