"""File format for arrays: shards are split into pieces that are written, read, and verified separately.

    weights/0-0.bin   a file of process 0: consecutive pieces of at most `PIECE` bytes, in C order
    weights/0-1.bin   the next file, started when the first reaches `FILE` bytes
    index/0.bin       shape, dtype, and pieces (file, offset, box, hash) of all arrays (see `piece_index`)
    weights/0.json    only in format 3: the index of process 0, for the arrays in this folder

A process appends a file of less than `SMALL` bytes to another of its files if it can, so a file in `weights/` may also contain
small arrays of `others/`.

Each shard is hashed and written once per job, by one of the processes that hold it. A reader can use any mesh, and reads only
the pieces that overlap its shards.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

PIECE, FILE, SMALL = 16 * 2**20, 64 * 2**20, 8 * 2**20
PREFIXES = ("params.", "variables.", "learner.ema.")
"""Path prefixes of weights: the model's weights and their moving average."""
Box = tuple[tuple[int, int], ...]
"""Start and end along each axis."""


class DamagedError(Exception):
    """A file is damaged. Callers add the name of the checkpoint."""


def is_weight(path: str) -> bool:
    """Return True if an array of a training state is stored with the weights."""
    return path.startswith(PREFIXES)


@attrs.frozen
class Piece:
    """A box of an array, stored in a file.

    Attributes:
        file: Path of the file in the folder `state/`.
        offset: Offset in the file, in bytes.
        start: First index along each axis of the array.
        shape: Size along each axis.
        sha256: Hash of the piece's bytes.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str

    @property
    def box(self) -> Box:
        """The box that the piece covers in the array."""
        return tuple((a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@attrs.frozen
class StoredArray:
    """An array and its pieces."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def piece_bytes(self, piece: Piece) -> int:
        """Return the size of a piece in bytes."""
        return math.prod(piece.shape) * jnp.dtype(self.dtype).itemsize


def iter_saved_shards(array: jax.Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the start and data of the shards that this process saves: replica 0 of each shard."""
    if array.is_fully_addressable and jax.process_index() > 0:
        return  # process 0 has the complete array
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(s.start or 0 for s in shard.index), shard.data


def iter_local_shards(array: jax.Array) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the start and data of each distinct shard on this process's devices."""
    shards = {tuple(s.start or 0 for s in shard.index): shard.data for shard in array.addressable_shards}
    yield from shards.items()


def split_shape(
    shape: Sequence[int], itemsize: int, limit: int = PIECE
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a shape into boxes of at most `limit` bytes, contiguous in C order. Yield the start and shape of each."""
    shape = tuple(shape)
    if not shape or math.prod(shape) * itemsize <= limit:
        yield (0,) * len(shape), shape
        return
    rows = limit // (math.prod(shape[1:]) * itemsize)
    for begin in range(0, shape[0], max(rows, 1)):
        if rows:
            yield (begin, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])
        else:
            yield from (((begin, *s), (1, *n)) for s, n in split_shape(shape[1:], itemsize, limit))


@attrs.frozen(eq=False)
class Part:
    """A piece of an array to write: its path, its box, and, until it is written, a view of host memory."""

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    view: memoryview | None


@attrs.define(eq=False)
class BinaryFile:
    """A file that consists of parts. Each part is hashed while it is written.

    Attributes:
        hashes: Hash of each part that has been written.
    """

    name: str
    bytes: int = 0
    hashes: list[str] = attrs.field(factory=list)
    _parts: list[Part] = attrs.field(factory=list)
    _buffers: list[int] = attrs.field(factory=list)

    def add(self, part: Part, buffer: int) -> None:
        """Append a part. `buffer` identifies its host memory."""
        self._parts.append(part)
        self._buffers.append(buffer)
        self.bytes += part.bytes

    def absorb(self, other: "BinaryFile") -> None:
        """Append the parts of another file, which is not written then."""
        self._parts += other._parts
        self._buffers += other._buffers
        self.bytes += other.bytes

    def release(self) -> list[int]:
        """Drop the views of all parts. Return the buffer of each part."""
        self._parts = [attrs.evolve(part, view=None) for part in self._parts]
        buffers, self._buffers = self._buffers, []
        return buffers

    def chunks(self) -> Iterator[memoryview]:
        """Yield the data of each part, and record its hash."""
        self.hashes.clear()
        for part in self._parts:
            assert part.view is not None
            self.hashes.append(hashlib.sha256(part.view).hexdigest())
            yield part.view

    def pieces(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the path and the index entry (offset, start, shape, hash) of each part."""
        offset = 0
        for part, digest in zip(self._parts, self.hashes, strict=True):
            yield part.path, [offset, list(part.start), list(part.shape), digest]
            offset += part.bytes


def render_index(described: Mapping[str, Mapping[str, Any]], files: Sequence[BinaryFile]) -> bytes:
    """Serialize the index of one process.

    Args:
        described: `shape`, `dtype`, and `cell` (the shape of a shard) of each array that has pieces, by path.
        files: Files of the process, which are written.
    """
    arrays: dict[str, Any] = {path: {**info, "pieces": []} for path, info in described.items()}
    for number, file in enumerate(files):
        for path, piece in file.pieces():
            arrays[path]["pieces"].append([number, *piece])
    sizes = [[f.name, f.bytes] for f in files]
    return json.dumps({"files": sizes, "arrays": arrays}, separators=(",", ":")).encode()


def parse_index(data: bytes, folder: str) -> dict[str, StoredArray]:
    """Parse the index of one process in format 3.

    Args:
        data: Content of the index.
        folder: Folder of the index and its files in `state/`, with a trailing `/`.

    Raises:
        ValueError, KeyError, TypeError: If the index is damaged.
    """
    body = json.loads(data)
    names = [f"{folder}{name}" for name, _ in body["files"]]
    return {
        path: StoredArray(
            path,
            tuple(info["shape"]),
            info["dtype"],
            tuple(
                Piece(names[n], offset, tuple(start), tuple(shape), sha)
                for n, offset, start, shape, sha in info["pieces"]
            ),
        )
        for path, info in body["arrays"].items()
    }


def merge_indices(indices: Sequence[Mapping[str, StoredArray]]) -> dict[str, StoredArray]:
    """Merge the indices of all processes in format 3."""
    pieces: dict[str, list[Piece]] = {}
    arrays: dict[str, StoredArray] = {}
    for path, array in (item for index in indices for item in index.items()):
        arrays[path] = array
        pieces.setdefault(path, []).extend(array.pieces)
    return {path: attrs.evolve(array, pieces=tuple(pieces[path])) for path, array in arrays.items()}
