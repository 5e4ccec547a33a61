"""Small data sets, which are encoded once and split between shards by row.

This module does not import Grain.

If each shard read different records, it would run out of its own and repeat the records of other shards. Instead, rows are
assigned to the shards round-robin. They are different as long as there are enough of them, and every epoch contains each row once.

Legend: S sequence length.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.data_files import is_url, open_data
from axlearn_plugins_transformer.text.examples import Example
from axlearn_plugins_transformer.text.records import Document, HasRecordBytes, Records
from axlearn_plugins_transformer.text.row_layout import ConcatLayout, Layout, PackedLayout, assemble
from axlearn_plugins_transformer.text.sources import Part

SMALL_BYTES = 1 << 22
LARGE_BYTES = 1 << 25
BATCHES = 64


def is_small(records: Records, tokens: int) -> bool:
    """Return whether to encode all records before the first batch.

    This is the case for at most 4 MiB of data, or for data that 64 batches use up, but never for more than 32 MiB, because one
    token takes 12 bytes of memory. Records of unknown size do not count as small.

    Args:
        records: The data.
        tokens: Tokens per batch.
    """
    return isinstance(records, HasRecordBytes) and records.num_bytes <= min(
        LARGE_BYTES, max(SMALL_BYTES, BATCHES * tokens)
    )


@attrs.define(eq=False)
class SmallData:
    """The rows of one part of the data, by number. They are built on first access.

    Attributes:
        part: The data.
        encode: Creates the examples for all documents in a record.
        packing: "concat", "first-fit" or "none".
        sequence_length: S.
        window: Maximum number of rows per batch from this part. These rows are different, as far as the data allows.
        seed: Seed of the row order.
        shuffle: Whether to shuffle the rows.
        report: Function that prints a note if an epoch has fewer rows than `window`.
        batches: Whether each batch has exactly `window` rows, all from this part.
    """

    part: Part
    encode: Callable[[Sequence[Document]], Sequence[Example]]
    packing: str
    sequence_length: int
    window: int
    seed: int
    shuffle: bool
    report: Callable[[str], None] | None = None
    batches: bool = False
    _checked: int = attrs.field(default=0, init=False)
    _data: "tuple[list[Example], list[int], Layout] | None" = attrs.field(default=None, init=False)

    def row(self, number: int) -> tuple[dict[str, Any], list[int]]:
        """Return a row as Grain packs it, and the records in which it begins and ends.

        Raises:
            InputError: A file has changed since it was listed. Files are checked when an epoch begins.
        """
        if self._data is None:
            self._data = self._lay_out()
        examples, records, layout = self._data
        if (epoch := layout.epoch(number)) != self._checked:
            self._check_files()
            self._checked = epoch
        spans = layout.row(number)
        return assemble(spans, examples, self.sequence_length), [records[spans[i][0]] for i in (0, -1)]

    def _lay_out(self) -> "tuple[list[Example], list[int], Layout]":
        source = self.part.records
        examples: list[Example] = []
        records: list[int] = []
        for i in range(len(source)):
            new_examples = self.encode(source[i])
            examples += new_examples
            records += [i] * len(new_examples)
        if not examples:
            raise InputError(
                f"{source.name(0)} and the records after it contain nothing to train on: no document yields a row"
            )
        lengths = np.array([len(e) for e in examples], np.int64)
        packed = functools.partial(PackedLayout, single=self.packing == "none", batches=self.batches)
        make = ConcatLayout if self.packing == "concat" else packed
        layout = make(lengths, self.sequence_length, self.window, self.seed, self.shuffle)
        if self.report and layout.epoch_rows < self.window:
            self.report(self._shortage(layout.epoch_rows, int(lengths.sum())))
        return examples, records, layout

    def _shortage(self, rows: int, tokens: int) -> str:
        name = f"the training data in {self.part.records.name(0)}"
        if not rows:
            return (
                f"{name} has {tokens:,} tokens, but a row needs {self.sequence_length:,}, so every row repeats tokens\n"
                f"    fix: add data, or set input.sequence_length={max(1, tokens // self.window)}"
            )
        return (
            f"{name} gives {rows} row{'s' * (rows > 1)} ({tokens:,} tokens) per epoch, but a batch needs {self.window}, so "
            f"every batch repeats rows\n    fix: add data, or set input.batch_size={rows}"
        )

    def _check_files(self) -> None:
        for file in self.part.files:
            if not is_url(file.path):
                open_data(file).close()


def print_note(text: str) -> None:
    """Print a note to standard error."""
    print(f"note: {text}", file=sys.stderr, flush=True)
