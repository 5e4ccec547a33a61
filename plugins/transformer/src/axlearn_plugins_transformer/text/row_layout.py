"""Layouts of small data: which tokens are in each row of the endless sequence of rows. Imports no Grain.

Legend: S sequence length, T tokens of an epoch.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from axlearn_plugins_transformer.text.cycle import Cycle, Permutations, shuffle_blocks
from axlearn_plugins_transformer.text.examples import Example

Span = tuple[int, int, int]
"""Index of an example, and the start and stop of some of its tokens."""

BINS = 16
"""Rows that first-fit packing fills at a time."""


class Layout(Protocol):
    """The rows of an endless sequence of epochs, by number.

    Attributes:
        epoch_rows: the fewest rows of an epoch.
    """

    epoch_rows: int

    def row(self, number: int) -> Sequence[Span]:
        """The tokens of a row, in order."""
        ...

    def epoch(self, number: int) -> int:
        """The epoch in which a row begins."""
        ...


class Joined:
    """Examples joined without end and cut every S tokens, so that nothing is lost or padded.

    Every epoch joins the examples in the same order. What it shuffles is the rows, so that a batch has text from many
    places. The cuts move by T mod S tokens from epoch to epoch.

    Args:
        lengths: tokens of each example, int64.
        sequence_length: S.
        window: any so many rows in a row are different, as far as the data allows.
        seed: of the shuffles.
        shuffle: if False, rows and examples are in the order in which they were given.
    """

    def __init__(self, lengths: np.ndarray, sequence_length: int, window: int, seed: int, shuffle: bool):
        self._length, self._window, self._seed, self._shuffle = sequence_length, window, seed, shuffle
        count = len(lengths)
        self._order = np.random.default_rng((seed, count)).permutation(count) if shuffle else np.arange(count)
        self._ends = np.cumsum(lengths[self._order])
        self._total = int(self._ends[-1])
        self._positions: tuple[int, np.ndarray] = (-1, self._order)
        self.epoch_rows = self._total // sequence_length

    def epoch(self, number: int) -> int:
        """The epoch in which a row begins."""
        return number * self._length // self._total

    def row(self, number: int) -> list[Span]:
        """The tokens of a row, in order."""
        if self._shuffle:
            number = self._shuffled(number)
        return list(self._spans(number * self._length % self._total))

    def _shuffled(self, number: int) -> int:
        epoch = self.epoch(number)
        first, end = (-(-e * self._total // self._length) for e in (epoch, epoch + 1))
        if self._positions[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            window = min(self._window, end - first)
            self._positions = (epoch, shuffle_blocks(np.arange(end - first), window, rng))
        return first + int(self._positions[1][number - first])

    def _spans(self, offset: int) -> Iterator[Span]:
        room, at = self._length, int(np.searchsorted(self._ends, offset, side="right"))
        start = offset - (int(self._ends[at - 1]) if at else 0)
        while room:
            size = int(self._ends[at]) - (int(self._ends[at - 1]) if at else 0)
            taken = min(room, size - start)
            yield int(self._order[at]), start, start + taken
            room, at, start = room - taken, (at + 1) % len(self._ends), 0


class Packed:
    """Rows of whole pieces. They are packed once; every epoch shuffles them.

    If an epoch has no more rows than `window`, every window has each of them, and its order is shuffled if windows are the
    batches.

    Args:
        lengths: tokens of each example, int64. Longer ones than a row are cut into pieces.
        sequence_length: S.
        window: any so many rows in a row are different, as far as the data allows.
        seed: of the shuffles.
        shuffle: if False, rows and examples are in the order in which they were given.
        single: whether each row has one piece.
        batches: whether the rows of each batch are a window: no others of a mixture are between them.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        sequence_length: int,
        window: int,
        seed: int,
        shuffle: bool,
        *,
        single: bool,
        batches: bool = False,
    ):
        pieces: list[Span] = [
            (i, start, min(start + sequence_length, length))
            for i, length in enumerate(lengths.tolist())
            for start in range(0, length, sequence_length)
        ]
        if shuffle and not single:
            pieces = [pieces[i] for i in np.random.default_rng((seed, len(pieces))).permutation(len(pieces))]
        self._rows = [[piece] for piece in pieces] if single else spread(first_fit(pieces, sequence_length), window)
        self.epoch_rows = len(self._rows)
        permutation = Permutations(self.epoch_rows, seed) if shuffle else None
        self._cycle = Cycle(self.epoch_rows, window, seed, permutation)
        repeats = shuffle and batches and self.epoch_rows <= window
        self._in_batch = Permutations(window, seed) if repeats else None

    def epoch(self, number: int) -> int:
        """The epoch that a row belongs to."""
        return number // self.epoch_rows

    def row(self, number: int) -> list[Span]:
        """The tokens of a row, in order."""
        if self._in_batch is not None:
            number = number - number % self._in_batch.count + self._in_batch(number)
        return self._rows[self._cycle(number)]


def first_fit(pieces: Sequence[Span], sequence_length: int) -> list[list[Span]]:
    """Puts each piece into the first of `BINS` rows that has room for it, or begins new rows when none has."""
    rows: list[list[Span]] = []
    bins: list[list[Span]] = [[] for _ in range(BINS)]
    room = [sequence_length] * BINS
    for piece in pieces:
        size = piece[2] - piece[1]
        if size > max(room):
            rows += bins
            bins, room = [[] for _ in range(BINS)], [sequence_length] * BINS
        first = next(i for i in range(BINS) if room[i] >= size)
        bins[first].append(piece)
        room[first] -= size
    return rows + [row for row in bins if row]


def spread(rows: list[list[Span]], count: int) -> list[list[Span]]:
    """Splits the rows with the most pieces until there are `count`, or each has one piece.

    A batch of more rows than an epoch has would repeat some; rows that are less full cost the same and repeat none.
    """
    rows = list(rows)
    while len(rows) < count:
        largest = max(range(len(rows)), key=lambda i: len(rows[i]))
        pieces = rows[largest]
        if len(pieces) < 2:
            break
        rows[largest : largest + 1] = [pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]]
    return rows


def assemble(spans: Sequence[Span], examples: Sequence[Example], sequence_length: int) -> dict[str, np.ndarray]:
    """One row as Grain packs it: {"tokens": [S, 3], "tokens_segment_ids": [S], "tokens_positions": [S]}, zero-padded."""
    tokens = np.zeros((sequence_length, 3), np.int32)
    segments, positions = np.zeros(sequence_length, np.int32), np.zeros(sequence_length, np.int32)
    at = 0
    for segment, (example, start, stop) in enumerate(spans, 1):
        end = at + stop - start
        tokens[at:end] = examples[example][start:stop]
        segments[at:end] = segment
        positions[at:end] = np.arange(end - at)
        at = end
    return {"tokens": tokens, "tokens_segment_ids": segments, "tokens_positions": positions}
