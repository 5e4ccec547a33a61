"""Grain pipelines from records to rows of tokens.

    records -> shuffle -> repeat -> every num_shards-th -> documents -> examples -> packed rows -> (mixture)

Each virtual shard is such a pipeline of its own, whichever process or worker runs it, and gives the same rows of every
batch. So the global stream depends on the seed and the number of virtual shards alone.

Legend: S sequence length, T tokens of a document.
"""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import grain
import numpy as np
from grain import experimental

from axlearn_core.compat import one_core_for_tokenizers, only_cpu
from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.examples import Example
from axlearn_plugins_transformer.text.records import Document, Records
from axlearn_plugins_transformer.text.sources import Part

Encode = Callable[[Sequence[Document], int], Sequence[Example | None]]
"""(documents, start) -> the examples from that document on, as many as are best made together; at least one."""
Finish = Callable[[Sequence[Mapping[str, np.ndarray]]], dict[str, np.ndarray]]

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # one thread or process reads ahead for all shards
BINS = 16  # rows that first-fit packing fills at a time
SEEDS = 2**32  # Grain's seeds are 32-bit
PERIOD = 10_000  # steps of a mixing pattern over which shards are spread


class Fan(experimental.FlatMapTransform):
    """Each element as those that `function` makes of it; many elements in a row that make none are an error."""

    def __init__(self, function: Callable[[Any], Any], most: float = float("inf"), of: str = ""):
        self.function, self.most, self.of, self.without = function, most, of, 0

    def flat_map(self, element: Any) -> Any:
        """The elements."""
        elements = self.function(element)
        self.without = 0 if elements else self.without + 1
        if self.without > self.most:
            raise InputError(f"a data shard finds no text in {self.of}\n    fix: shuffle, or set another num_shards")
        return elements


class Examples:
    """What documents teach, made when it is asked for. So a record that is read again is not encoded from its beginning."""

    def __init__(self, encode: Encode, documents: Sequence[Document]):
        self.encode, self.documents = encode, documents
        self._start = 0
        self._made: Sequence[Example | None] = ()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Example | None:
        if not self._start <= index < self._start + len(self._made):
            self._start, self._made = index, self.encode(self.documents, index)
        return self._made[index - self._start]


def check_text(records: Records) -> None:
    """Reads up to the first document; raises `InputError` where there is none, or what is read is not text."""
    if not any(texts(records[i]) for i in range(len(records))):
        raise InputError(f"there is no text in {records.name(0)}, nor in the records after it")


def texts(documents: Sequence[Document]) -> list[Document]:
    """The documents that are not empty."""
    return [d for d in documents if d.text]


@attrs.frozen
class Packing:
    """How examples become rows.

    "concat" joins them and cuts every S tokens, so nothing is lost or padded; "first-fit" keeps those that fit into a
    row whole; "none" gives each its own. The last two cut examples that are longer than a row.
    """

    kind: str
    sequence_length: int

    def __call__(self, examples: grain.IterDataset) -> grain.IterDataset:
        """Rows: {"tokens": [S, 3], "tokens_segment_ids": [S], "tokens_positions": [S]}, zero where padded."""
        length = {"tokens": self.sequence_length}
        if self.kind == "concat":
            return experimental.ConcatThenSplitIterDataset(examples.map(_to_element), length_struct=length)
        return experimental.FirstFitPackIterDataset(
            experimental.FlatMapIterDataset(examples, Fan(self.pieces)).map(_to_element),
            length_struct=length,
            num_packing_bins=BINS,
            shuffle_bins=False,
            max_sequences_per_bin=1 if self.kind == "none" else None,
        )

    def pieces(self, tokens: Example) -> list[Example]:
        """An example in pieces of at most S tokens."""
        return [tokens[i : i + self.sequence_length] for i in range(0, len(tokens), self.sequence_length)]


def _to_element(tokens: Example) -> dict[str, Example]:
    return {"tokens": tokens}


def _is_nonempty(tokens: Example | None) -> bool:
    return tokens is not None and len(tokens) > 0


def _shuffle(documents: Sequence[Document], rng: np.random.Generator) -> Sequence[Document]:
    return [documents[i] for i in rng.permutation(len(documents))] if len(documents) > 1 else documents


def _rows(records: grain.MapDataset, fan: Fan, packing: Packing) -> grain.IterDataset:
    examples = experimental.FlatMapIterDataset(records.to_iter_dataset(INLINE), fan)
    return packing(examples.filter(_is_nonempty))


def examples_of(encode: Encode, documents: Sequence[Document]) -> Examples:
    """What the documents of a record teach; those that are empty are left out."""
    return Examples(encode, texts(documents))


@attrs.frozen
class Order:
    """The endless sequence of a shard's records, newly shuffled in every epoch."""

    seed: int
    shuffle: bool
    num_shards: int

    def of(self, part: int) -> int:
        """The seed of a mixture's part: two parts of the same size are not shuffled alike."""
        return (self.seed + part * 7919) % SEEDS

    def __call__(self, source: Any, part: int, shard: int) -> grain.MapDataset:
        """The elements of `source` in the order in which `shard` reads them."""
        records = grain.MapDataset.source(source)
        if self.shuffle:
            records = records.shuffle(seed=self.of(part))
        return records.repeat()[shard :: self.num_shards]


def training_rows(
    parts: Sequence[Part], encode: Encode, packing: Packing, order: Order, shard: int
) -> grain.IterDataset:
    """The endless rows of one virtual shard. The parts of a mixture are packed apart, and share the rows by weight."""
    streams = []
    for i, part in enumerate(parts):
        records = order(part.records, i, shard)
        if order.shuffle:
            records = records.random_map(_shuffle, seed=order.of(i))
        # By chance alone, a shard does not miss what text there is this often.
        fan = Fan(functools.partial(examples_of, encode), most=100 * len(part.records), of=part.records.name(0))
        streams.append(_rows(records, fan, packing))
    if len(streams) == 1:
        return streams[0]
    # Shards start at different places of the mixing pattern; else each batch would come from one part only.
    mixed = grain.IterDataset.mix(streams, [p.weight for p in parts])
    return StartAt(mixed, shard * PERIOD // order.num_shards)


class StartAt(grain.IterDataset):
    """A mixture that begins `index` steps into its pattern, each part at its own beginning."""

    def __init__(self, mixed: grain.IterDataset, index: int):
        super().__init__(mixed)
        self.index = index

    def __iter__(self) -> Any:
        iterator = self._parent.__iter__()
        iterator.set_state({**iterator.get_state(), "index": self.index})
        return iterator


def evaluation_rows(parts: Iterable[Part], encode: Encode, packing: Packing) -> grain.IterDataset:
    """All rows of all parts, once, in order."""
    records = grain.MapDataset.concatenate([grain.MapDataset.source(p.records) for p in parts])
    return _rows(records, Fan(functools.partial(examples_of, encode)), packing)


class Shards(grain.IterDataset):
    """Batches of some virtual shards: `rows` rows of each, in the order of the shards. Its state is kept by shard."""

    def __init__(self, shards: Mapping[int, grain.IterDataset], rows: int, finish: Finish):
        super().__init__(list(shards.values()))
        self.ids, self.rows, self.finish = [str(i) for i in shards], rows, finish

    def __iter__(self) -> Any:
        return _ShardsIterator(self, [p.__iter__() for p in self._parents])


class _ShardsIterator(grain.DatasetIterator):
    def __init__(self, dataset: Shards, parents: Sequence[grain.DatasetIterator]):
        super().__init__(parents)
        self.dataset = dataset

    def __next__(self) -> dict[str, np.ndarray]:
        return self.dataset.finish([next(parent) for parent in self._parents for _ in range(self.dataset.rows)])

    def get_state(self) -> dict[str, Any]:
        return {i: parent.get_state() for i, parent in zip(self.dataset.ids, self._parents, strict=True)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        for i, parent in zip(self.dataset.ids, self._parents, strict=True):
            parent.set_state(state[i])


def start_worker(pid_file: str, index: int, count: int) -> None:
    """Run first in each Grain worker process: ends it when the process that started it is gone, even by `kill -9`.

    Writes the process id into `pid_file`.
    """
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    only_cpu(always=True)  # Grain imports JAX; no worker may take a device
    one_core_for_tokenizers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="axlearn-parent-watch", daemon=True).start()
