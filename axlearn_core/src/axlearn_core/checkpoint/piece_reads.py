"""Reads pieces from storage. Object stores read small pieces that are next to each other in a file with one request."""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import TracebackType

import attrs
import numpy as np

from axlearn_core.checkpoint.shards import PIECE, Piece, StoredArray
from axlearn_core.contracts.storage import JoinsReads, Storage
from axlearn_core.errors import StorageError

BUDGET = 256 * 2**20
"""Maximum number of bytes that are read before they are needed."""
AHEAD = 2
"""Number of spans to read before they are needed."""


@attrs.frozen
class PlacedPiece:
    """A piece that will be read.

    Attributes:
        turn: Number of the array to which it belongs, in the order in which arrays are read.
        bytes: Size of the piece in bytes.
    """

    piece: Piece
    turn: int
    bytes: int

    @property
    def end(self) -> int:
        """Offset of the end of the piece in its file."""
        return self.piece.offset + self.bytes


@attrs.define(eq=False)
class _Span:
    """Pieces that one request reads."""

    pieces: Sequence[PlacedPiece]
    missing: int
    data: "Future[np.ndarray] | None" = None

    @property
    def begin(self) -> int:
        return self.pieces[0].piece.offset

    @property
    def bytes(self) -> int:
        return self.pieces[-1].end - self.begin

    @property
    def turns(self) -> range:
        """The turns during which the span is in memory."""
        turns = [piece.turn for piece in self.pieces]
        return range(min(turns), max(turns) + 1)


class PieceReads:
    """Reads pieces, each once. It is thread-safe.

    If the storage is a `JoinsReads`, small pieces that follow each other in a file are read together, up to `PIECE` bytes. They
    stay in memory until all of them have been used. If too much memory would be needed, other pieces are read separately.

    Args:
        storage: Storage of the files.
        folder: Folder that contains the files of the pieces, with a trailing `/`.
        pieces: All pieces that will be read.
    """

    def __init__(self, storage: Storage, folder: str, pieces: Iterable[PlacedPiece]):
        self._storage, self._folder = storage, folder
        limit = storage.joined_bytes if isinstance(storage, JoinsReads) else 0
        spans = _limit_memory(_join_pieces(pieces, limit))
        self._order = sorted(spans, key=lambda span: span.turns.start)
        self._spans = {(p.piece.file, p.piece.offset): span for span in spans for p in span.pieces}
        self._started = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def __enter__(self) -> "PieceReads":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read_into(self, piece: Piece, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a piece. Raise `StorageError` if they cannot be read."""
        span = self._spans.get((piece.file, piece.offset))
        if span is not None:
            try:
                data = self._start(span).result()
            except StorageError:  # read the piece alone, so that only pieces that cannot be read fail
                data = None
            if data is not None:
                begin = piece.offset - span.begin
                buffer[:] = data[begin : begin + len(buffer)].data
                self._release(span)
                return
        self._storage.read_into(f"{self._folder}{piece.file}", piece.offset, buffer)

    def _start(self, span: _Span) -> "Future[np.ndarray]":
        """Start to read a span and those that are needed next."""
        with self._lock:
            if span.data is None:
                span.data = self._pool.submit(self._read_span, span)
            while self._started < len(self._order) and self._order[self._started].data is not None:
                self._started += 1
            for other in self._order[self._started : self._started + AHEAD]:
                if other.data is None:
                    other.data = self._pool.submit(self._read_span, other)
            return span.data

    def _release(self, span: _Span) -> None:
        with self._lock:
            span.missing -= 1
            if not span.missing:
                span.data = Future()  # without the data
                for piece in span.pieces:
                    del self._spans[piece.piece.file, piece.piece.offset]

    def _read_span(self, span: _Span) -> np.ndarray:
        data = np.empty(span.bytes, np.uint8)
        self._storage.read_into(f"{self._folder}{span.pieces[0].piece.file}", span.begin, data.data)
        return data


def _join_pieces(pieces: Iterable[PlacedPiece], limit: int) -> list[_Span]:
    """Join pieces of less than `limit` bytes that follow each other, up to `PIECE` bytes."""
    files: dict[str, list[PlacedPiece]] = {}
    for piece in pieces:
        if 0 < piece.bytes < limit:
            files.setdefault(piece.piece.file, []).append(piece)
    spans = []
    for members in files.values():
        members.sort(key=lambda piece: piece.piece.offset)
        starts = [0]
        for number, (one, other) in enumerate(pairwise(members), 1):
            if one.end != other.piece.offset or other.end - members[starts[-1]].piece.offset > PIECE:
                starts.append(number)
        for begin, end in pairwise([*starts, len(members)]):
            if end - begin > 1:
                spans.append(_Span(members[begin:end], end - begin))
    return spans


def _limit_memory(spans: Sequence[_Span]) -> list[_Span]:
    """Return spans that together need at most `BUDGET` bytes at any time."""
    used = np.zeros(max((span.turns.stop for span in spans), default=0), np.int64)
    chosen = []
    for span in sorted(spans, key=lambda span: len(span.turns)):
        turns = slice(span.turns.start, span.turns.stop)
        if used[turns].max() + span.bytes <= BUDGET:
            used[turns] += span.bytes
            chosen.append(span)
    return chosen


def place_pieces(arrays: Mapping[str, StoredArray], pieces: Mapping[str, Iterable[Piece]]) -> list[PlacedPiece]:
    """Return the pieces that will be read, by the path of their array in the order in which arrays are read."""
    return [
        PlacedPiece(piece, turn, arrays[path].piece_bytes(piece))
        for turn, path in enumerate(pieces)
        for piece in pieces[path]
    ]
