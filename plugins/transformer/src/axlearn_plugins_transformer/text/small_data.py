"""Small data: all of it is encoded once, and its rows are dealt out one by one. Imports no Grain.

Shards that read records of their own would run out of them, and then read what other shards read. Rows that are dealt
in turn are different as long as there are enough of them, and every epoch has each of them once.

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
from axlearn_plugins_transformer.text.row_layout import Joined, Layout, Packed, assemble
from axlearn_plugins_transformer.text.sources import Part

SMALL_BYTES = 1 << 22
LARGE_BYTES = 1 << 25
BATCHES = 64


def is_small(records: Records, tokens: int) -> bool:
    """Whether all of some records are encoded before the first batch.

    They are if they have at most 4 MiB, or so few bytes that 64 batches use them up, but never if they have more
    than 32 MiB: one token takes 12 bytes of memory. Records that do not tell their size are not small.

    Args:
        records: the data.
        tokens: of a batch.
    """
    return isinstance(records, HasRecordBytes) and records.num_bytes <= min(
        LARGE_BYTES, max(SMALL_BYTES, BATCHES * tokens)
    )


@attrs.define(eq=False)
class SmallData:
    """The rows of one part of the data, by number. They are made when the first one is asked for.

    Attributes:
        part: the data.
        encode: makes examples of all documents of a record.
        packing: "concat", "first-fit" or "none".
        sequence_length: S.
        window: the most rows of a batch that come from this part; they are different, as far as the data allows.
        seed: of the order of rows.
        shuffle: whether rows are shuffled.
        report: is given a line of text if there are fewer rows in an epoch than `window`.
        batches: whether each batch has `window` rows of this part, and no others.
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
        """A row as Grain packs it, and the records that it begins and ends in.

        Raises:
            InputError: a file changed since it was listed, which is noticed when an epoch begins.
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
            added = self.encode(source[i])
            examples += added
            records += [i] * len(added)
        if not examples:
            raise InputError(
                f"there is nothing to learn in {source.name(0)}, nor in the records after it: no document gives a row"
            )
        lengths = np.array([len(e) for e in examples], np.int64)
        packed = functools.partial(Packed, single=self.packing == "none", batches=self.batches)
        make = Joined if self.packing == "concat" else packed
        layout = make(lengths, self.sequence_length, self.window, self.seed, self.shuffle)
        if self.report and layout.epoch_rows < self.window:
            self.report(self._shortage(layout.epoch_rows, int(lengths.sum())))
        return examples, records, layout

    def _shortage(self, rows: int, tokens: int) -> str:
        name = f"the training data in {self.part.records.name(0)}"
        if not rows:
            return (
                f"{name} has {tokens:,} tokens, and a row takes {self.sequence_length:,}: every row repeats some\n"
                f"    fix: more data, or input.sequence_length={max(1, tokens // self.window)}"
            )
        return (
            f"{name} gives {rows} row{'s' * (rows > 1)} ({tokens:,} tokens) per pass, and a batch takes {self.window}: "
            f"every batch repeats some\n    fix: more data, or input.batch_size={rows}"
        )

    def _check_files(self) -> None:
        for file in self.part.files:
            if not is_url(file.path):
                open_data(file).close()


def print_note(text: str) -> None:
    """Prints a line for a person."""
    print(f"note: {text}", file=sys.stderr, flush=True)
