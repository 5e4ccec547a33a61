"""Row layouts for small datasets. A layout defines the tokens of each row in an endless sequence of rows.

This module does not import Grain.

Legend: S sequence length, T tokens of an epoch.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from axlearn_plugins_transformer.text.cycle import Cycle, Permutations, shuffle_blocks
from axlearn_plugins_transformer.text.examples import Example

Span = tuple[int, int, int]
"""Index of an example, then start and stop of a token range in it."""

BINS = 16
"""Number of rows that first-fit packing fills at a time."""


class Layout(Protocol):
    """The rows of endless epochs, by number.

    Attributes:
        epoch_rows: Minimum number of rows per epoch.
    """

    epoch_rows: int

    def row(self, number: int) -> Sequence[Span]:
        """Return the tokens of a row, in order."""
        ...

    def epoch(self, number: int) -> int:
        """Return the epoch in which a row begins."""
        ...


class ConcatLayout:
    """Concatenates examples endlessly and cuts every S tokens.

    No token is lost or padded. Every epoch concatenates the examples in the same order and shuffles the rows, so a
    batch mixes text from many places. The cuts move by T mod S tokens from epoch to epoch.

    Args:
        lengths: Tokens of each example, int64.
        sequence_length: S.
        window: Number of consecutive rows that must differ, as far as the data allows.
        seed: Seed of the shuffles.
        shuffle: If False, examples and rows keep the given order.
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
        """Return the epoch in which a row begins."""
        return number * self._length // self._total

    def row(self, number: int) -> list[Span]:
        """Return the tokens of a row, in order."""
        if self._shuffle:
            number = self._shuffled_row(number)
        return list(self._spans(number * self._length % self._total))

    def _shuffled_row(self, number: int) -> int:
        epoch = self.epoch(number)
        first, end = (-(-e * self._total // self._length) for e in (epoch, epoch + 1))
        if self._positions[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            window = min(self._window, end - first)
            self._positions = (epoch, shuffle_blocks(np.arange(end - first), window, rng))
        return first + int(self._positions[1][number - first])

    def _spans(self, offset: int) -> Iterator[Span]:
        remaining, index = self._length, int(np.searchsorted(self._ends, offset, side="right"))
        start = offset - (int(self._ends[index - 1]) if index else 0)
        while remaining:
            size = int(self._ends[index]) - (int(self._ends[index - 1]) if index else 0)
            count = min(remaining, size - start)
            yield int(self._order[index]), start, start + count
            remaining, index, start = remaining - count, (index + 1) % len(self._ends), 0


class PackedLayout:
    """Packs whole examples (or row-sized pieces of long ones) into rows once, and shuffles the rows every epoch.

    If an epoch has at most `window` rows, every window contains each of them. Their order within a window is shuffled if
    windows are batches.

    Args:
        lengths: Tokens of each example, int64. Examples that are longer than a row are cut into pieces.
        sequence_length: S.
        window: Number of consecutive rows that must differ, as far as the data allows.
        seed: Seed of the shuffles.
        shuffle: If False, examples and rows keep the given order.
        single: Put only one piece into each row.
        batches: Whether the rows of a batch form a window, with no rows from other parts of a mixture between them.
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
        self._rows = [[piece] for piece in pieces] if single else split_rows(first_fit(pieces, sequence_length), window)
        self.epoch_rows = len(self._rows)
        permutation = Permutations(self.epoch_rows, seed) if shuffle else None
        self._cycle = Cycle(self.epoch_rows, window, seed, permutation)
        repeats = shuffle and batches and self.epoch_rows <= window
        self._in_batch = Permutations(window, seed) if repeats else None

    def epoch(self, number: int) -> int:
        """Return the epoch of a row."""
        return number // self.epoch_rows

    def row(self, number: int) -> list[Span]:
        """Return the tokens of a row, in order."""
        if self._in_batch is not None:
            number = number - number % self._in_batch.count + self._in_batch(number)
        return self._rows[self._cycle(number)]


def first_fit(pieces: Sequence[Span], sequence_length: int) -> list[list[Span]]:
    """Put each piece into the first of `BINS` rows with room for it.

    Start a new row if none of them has room.
    """
    rows: list[list[Span]] = []
    bins: list[list[Span]] = [[] for _ in range(BINS)]
    free = [sequence_length] * BINS
    for piece in pieces:
        size = piece[2] - piece[1]
        if size > max(free):
            rows += bins
            bins, free = [[] for _ in range(BINS)], [sequence_length] * BINS
        first = next(i for i in range(BINS) if free[i] >= size)
        bins[first].append(piece)
        free[first] -= size
    return rows + [row for row in bins if row]


def split_rows(rows: list[list[Span]], count: int) -> list[list[Span]]:
    """Split the fullest rows until there are `count` rows.

    Rows with one piece are not split.

    A batch with more rows than an epoch would repeat rows. Emptier rows avoid this at no additional cost.
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
    """Return a zero-padded row as Grain packs it.

    Returns:
        {"tokens": [S, 3], "tokens_segment_ids": [S], "tokens_positions": [S]}.
    """
    tokens = np.zeros((sequence_length, 3), np.int32)
    segments, positions = np.zeros(sequence_length, np.int32), np.zeros(sequence_length, np.int32)
    offset = 0
    for segment, (example, start, stop) in enumerate(spans, 1):
        end = offset + stop - start
        tokens[offset:end] = examples[example][start:stop]
        segments[offset:end] = segment
        positions[offset:end] = np.arange(end - offset)
        offset = end
    return {"tokens": tokens, "tokens_segment_ids": segments, "tokens_positions": positions}
