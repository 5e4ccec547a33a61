"""Grain pipelines from records to rows of tokens.

    large data: records -> every num_shards-th of a shuffled, endless order -> documents -> examples -> packed rows
    small data: all examples -> an endless order of packed rows -> every num_shards-th

Each virtual shard is a separate pipeline. It produces the same rows of every batch, regardless of which process or worker runs
it. The global stream therefore depends only on the seed and the number of virtual shards.

Legend: S sequence length, T tokens of a document.
"""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import grain
import numpy as np
from grain import experimental

from axlearn_core.compat import disable_tokenizer_threads, use_cpu
from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text import order_1
from axlearn_plugins_transformer.text.cycle import Cycle
from axlearn_plugins_transformer.text.examples import Example
from axlearn_plugins_transformer.text.positions import ORDER
from axlearn_plugins_transformer.text.records import Document, Records
from axlearn_plugins_transformer.text.row_layout import BINS
from axlearn_plugins_transformer.text.shares import Shares
from axlearn_plugins_transformer.text.small_data import SmallData
from axlearn_plugins_transformer.text.sources import Part

Encode = Callable[[Sequence[Document], int], Sequence[Example | None]]
"""(documents, start) -> examples starting with that document: at least one, and as many as are efficient to encode together."""
Finish = Callable[[Sequence[Mapping[str, np.ndarray]]], dict[str, np.ndarray]]

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # one thread or process prefetches for all shards
SEEDS = 2**32  # Grain's seeds are 32-bit


class Expand(experimental.FlatMapTransform):
    """Replaces each element with the elements that `function` returns.

    Too many consecutive empty results are an error.
    """

    def __init__(self, function: Callable[[Any], Any], max_empty: float = float("inf"), location: str = ""):
        self.function, self.max_empty, self.location, self.num_empty = function, max_empty, location, 0

    def flat_map(self, element: Any) -> Any:
        """Return the elements that replace `element`."""
        elements = self.function(element)
        self.num_empty = 0 if elements else self.num_empty + 1
        if self.num_empty > self.max_empty:
            raise InputError(
                f"a data shard finds no text in {self.location}\n    fix: shuffle, or set another num_shards"
            )
        return elements


class Examples:
    """Examples of documents, encoded lazily.

    Resuming in the middle of a record therefore does not encode the record's beginning again.
    """

    def __init__(self, encode: Encode, documents: Sequence[Document]):
        self.encode, self.documents = encode, documents
        self._start = 0
        self._encoded: Sequence[Example | None] = ()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Example | None:
        if not self._start <= index < self._start + len(self._encoded):
            self._start, self._encoded = index, self.encode(self.documents, index)
        return self._encoded[index - self._start]


def check_text(records: Records) -> None:
    """Read the data up to the first document.

    Raise InputError if no document exists, or if the data is not text.
    """
    if not any(texts(records[i]) for i in range(len(records))):
        raise InputError(f"{records.name(0)} and the records after it do not contain text")


def texts(documents: Sequence[Document]) -> list[Document]:
    """Return the documents that are not empty."""
    return [d for d in documents if d.text]


@attrs.frozen
class Packing:
    """Packs examples into rows.

    "concat" joins the examples and cuts every S tokens, so no token is lost or padded. "first-fit" keeps examples whole if
    they fit into a row. "none" puts each example into a separate row. The last two cut examples that are longer than a row.

    Attributes:
        kind: "concat", "first-fit" or "none".
        sequence_length: S.
    """

    kind: str
    sequence_length: int

    def __call__(self, examples: grain.IterDataset) -> grain.IterDataset:
        """Return zero-padded rows.

        A row is {"tokens": [S, 3], "tokens_segment_ids": [S], "tokens_positions": [S]}.
        """
        length = {"tokens": self.sequence_length}
        if self.kind == "concat":
            return experimental.ConcatThenSplitIterDataset(examples.map(_to_element), length_struct=length)
        return experimental.FirstFitPackIterDataset(
            experimental.FlatMapIterDataset(examples, Expand(self.pieces)).map(_to_element),
            length_struct=length,
            num_packing_bins=BINS,
            shuffle_bins=False,
            max_sequences_per_bin=1 if self.kind == "none" else None,
        )

    def pieces(self, tokens: Example) -> list[Example]:
        """Cut an example into pieces of at most S tokens."""
        return [tokens[i : i + self.sequence_length] for i in range(0, len(tokens), self.sequence_length)]


def _to_element(tokens: Example) -> dict[str, Example]:
    return {"tokens": tokens}


def _is_nonempty(tokens: Example | None) -> bool:
    return tokens is not None and len(tokens) > 0


def _rows(records: grain.MapDataset, expand: Expand, packing: Packing) -> grain.IterDataset:
    examples = experimental.FlatMapIterDataset(records.to_iter_dataset(INLINE), expand)
    return packing(examples.filter(_is_nonempty))


def make_examples(encode: Encode, documents: Sequence[Document]) -> Examples:
    """Return the examples of a record's documents, encoded lazily.

    Empty documents are omitted.
    """
    return Examples(encode, texts(documents))


def all_examples(encode: Encode, documents: Sequence[Document]) -> list[Example]:
    """Return the examples of a record's documents, encoded at once, without empty examples."""
    examples = make_examples(encode, documents)
    return [e for e in map(examples.__getitem__, range(len(examples))) if e is not None and len(e)]


@attrs.frozen
class Order:
    """The settings that the sequences of all shards share.

    Attributes:
        seed: Random seed.
        shuffle: Whether to shuffle.
        num_shards: Number of virtual shards.
    """

    seed: int
    shuffle: bool
    num_shards: int

    def for_part(self, part: int) -> int:
        """Return the seed for a part of a mixture.

        Parts of the same size are shuffled differently.
        """
        return (self.seed + part * 7919) % SEEDS

    def reads(self, records: Records, part: int, shard: int) -> "Reads":
        """Return the records that a shard reads from a part."""
        seed, count = self.for_part(part), len(records)
        shuffle = Shuffle(count, seed) if self.shuffle else None
        return Reads(records, Cycle(count, self.num_shards, seed, shuffle), shard)

    def names(self, records: Records, part: int, shard: int, current: bool) -> Callable[[int], str]:
        """Return a function that names the record at a position of a shard, for messages."""
        if current:
            return self.reads(records, part, shard).name
        numbers = order_1.read(range(len(records)), self.for_part(part), self.shuffle, shard, self.num_shards)

        def name(index: int) -> str:
            number: Any = numbers[index]
            return records.name(int(number))

        return name


@attrs.frozen
class Shuffle:
    """A new Grain permutation for each epoch, which needs no memory.

    Attributes:
        count: Number of elements.
        seed: Random seed.
    """

    count: int
    seed: int

    def __call__(self, index: int) -> int:
        """Return the number at `index`."""
        number: Any = _shuffled_range(self.count, self.seed)[index]
        return int(number)


@functools.lru_cache(maxsize=64)
def _shuffled_range(count: int, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(count).shuffle(seed=seed)


@attrs.frozen(eq=False)
class Reads:
    """The endless sequence of records that a shard reads, each as its documents.

    The shards divide an endless order of records, in which neighboring records are different, among themselves. No two
    shards therefore read the same record at the same time. If there are fewer records than shards, several shards must read
    the same record; they then begin at different places in it.

    Attributes:
        records: The records.
        order: Endless order of the records.
        shard: Index of the shard.
    """

    records: Records
    order: Cycle
    shard: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Sequence[Document]:
        position, places = self._index(int(index)), self._places()
        number, epoch = self.order(position), position // self.order.count
        documents = self.records[number]
        if self.order.permutation is not None and len(documents) > 1:
            rng = np.random.default_rng((self.order.seed, number, epoch // places))
            documents = [documents[i] for i in rng.permutation(len(documents))]
        return rotate_documents(documents, epoch % places, places)

    def name(self, index: int) -> str:
        """Return the name of the record at a position, for messages."""
        return self.records.name(self.number(index))

    def number(self, index: int) -> int:
        """Return the number of the record at a position."""
        return self.order(self._index(index))

    def _index(self, index: int) -> int:
        return self.shard + index * self.order.window

    def _places(self) -> int:
        """Return the number of places in a record at which shards begin.

        There is one place per simultaneous reader, plus one.
        """
        shards, count = self.order.window, self.order.count
        return 1 if shards <= count else -(-shards // count) + 1


def rotate_documents(documents: Sequence[Document], place: int, places: int) -> Sequence[Document]:
    """Rotate the documents to begin at one of `places` places.

    If there are too few documents, the place is within a document.
    """
    if not place or not documents:
        return documents
    if len(documents) >= places:
        first = len(documents) * place // places
        return [*documents[first:], *documents[:first]]
    offset = sum(len(d.text) for d in documents) * place // places
    first = 0
    while offset >= len(documents[first].text):
        offset -= len(documents[first].text)
        first += 1
    rotated = [*documents[first + 1 :], *documents[:first]]
    cut = documents[first]
    if type(cut) is not Document or not offset:  # a subclass may need the whole text
        return [cut, *rotated]
    return [Document(cut.text[offset:], cut.ends), *rotated, Document(cut.text[:offset], ends=False)]


def training_rows(
    data: Sequence["Part | SmallData"], encode: Encode, packing: Packing, order: Order, shares: Shares, shard: int
) -> grain.IterDataset:
    """Return the endless rows of one virtual shard.

    Parts of a mixture are packed separately. Each part gets a share of the rows in proportion to its weight.
    """
    streams: list[grain.IterDataset] = []
    for i, part in enumerate(data):
        if isinstance(part, SmallData):
            streams.append(SmallDataRows(part, shares, i, shard))
            continue
        reads = grain.MapDataset.source(order.reads(part.records, i, shard))
        streams.append(_rows(reads, _expand_documents(part, encode), packing))
    return streams[0] if len(streams) == 1 else MixedRows(streams, shares, shard)


def training_rows_of_order_1(
    parts: Sequence[Part], encode: Encode, packing: Packing, order: Order, shard: int
) -> grain.IterDataset:
    """Return the endless rows of one virtual shard, for a run that an older version started."""

    def pack(part: Part, records: grain.MapDataset) -> grain.IterDataset:
        return _rows(records, _expand_documents(part, encode), packing)

    seeds = [order.for_part(i) for i in range(len(parts))]
    return order_1.training_rows(parts, pack, seeds, order.shuffle, shard, order.num_shards)


def _expand_documents(part: Part, encode: Encode) -> Expand:
    # If the data contained any text, a shard would not miss it this many times in a row by chance.
    return Expand(functools.partial(make_examples, encode), 100 * len(part.records), part.records.name(0))


class SmallDataRows(grain.IterDataset):
    """The rows of small data for one shard.

    Its state contains the records in which the last row begins and ends.
    """

    def __init__(self, data: SmallData, shares: Shares, part: int, shard: int):
        super().__init__()
        self.data, self.shares, self.part, self.shard = data, shares, part, shard

    def __iter__(self) -> Any:
        return _SmallDataRowsIterator(self)


class _SmallDataRowsIterator(grain.DatasetIterator):
    def __init__(self, dataset: SmallDataRows):
        super().__init__()
        self.dataset, self.turn, self.records = dataset, 0, [0, 0]

    def __next__(self) -> dict[str, np.ndarray]:
        dataset, part = self.dataset, -1
        number = 0
        while part != dataset.part:  # skip the turns of other parts of a mixture
            part, number = dataset.shares.row(self.turn, dataset.shard)
            self.turn += 1
        row, self.records = dataset.data.row(number)
        return row

    def get_state(self) -> dict[str, Any]:
        return {"turn": self.turn, "records": self.records}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.turn, self.records = state["turn"], list(state["records"])


class MixedRows(grain.IterDataset):
    """The rows of a mixture for one shard."""

    def __init__(self, streams: Sequence[grain.IterDataset], shares: Shares, shard: int):
        super().__init__(list(streams))
        self.shares, self.shard = shares, shard

    def __iter__(self) -> Any:
        return _MixedRowsIterator(self, [p.__iter__() for p in self._parents])


class _MixedRowsIterator(grain.DatasetIterator):
    def __init__(self, dataset: MixedRows, parents: Sequence[grain.DatasetIterator]):
        super().__init__(parents)
        self.dataset, self.turn = dataset, 0

    def __next__(self) -> dict[str, np.ndarray]:
        part, _ = self.dataset.shares.row(self.turn, self.dataset.shard)
        self.turn += 1
        return next(self._parents[part])

    def get_state(self) -> dict[str, Any]:
        return {"turn": self.turn, "parts": [parent.get_state() for parent in self._parents]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.turn = state["turn"]
        for parent, parent_state in zip(self._parents, state["parts"], strict=True):
            parent.set_state(parent_state)


def evaluation_rows(parts: Iterable[Part], encode: Encode, packing: Packing) -> grain.IterDataset:
    """Return all rows of all parts, once, in order."""
    records = grain.MapDataset.concatenate([grain.MapDataset.source(p.records) for p in parts])
    return _rows(records, Expand(functools.partial(make_examples, encode)), packing)


class Shards(grain.IterDataset):
    """Batches of several virtual shards, with `rows` rows of each, in shard order.

    The state is saved by shard. If `current`, it is marked with the data order of this version.
    """

    def __init__(self, shards: Mapping[int, grain.IterDataset], rows: int, finish: Finish, *, current: bool = True):
        super().__init__(list(shards.values()))
        self.ids, self.rows, self.finish, self.current = [str(i) for i in shards], rows, finish, current

    def __iter__(self) -> Any:
        return _ShardsIterator(self, [p.__iter__() for p in self._parents])


class _ShardsIterator(grain.DatasetIterator):
    def __init__(self, dataset: Shards, parents: Sequence[grain.DatasetIterator]):
        super().__init__(parents)
        self.dataset = dataset

    def __next__(self) -> dict[str, np.ndarray]:
        return self.dataset.finish([next(parent) for parent in self._parents for _ in range(self.dataset.rows)])

    def get_state(self) -> dict[str, Any]:
        states = dict(zip(self.dataset.ids, [parent.get_state() for parent in self._parents], strict=True))
        return {i: {"order": ORDER, "rows": s} for i, s in states.items()} if self.dataset.current else states

    def set_state(self, state: Mapping[str, Any]) -> None:
        for i, parent in zip(self.dataset.ids, self._parents, strict=True):
            parent.set_state(state[i]["rows"] if self.dataset.current else state[i])


def start_worker(pid_file: str, index: int, count: int) -> None:
    """Initialize a Grain worker process.

    The worker exits when its parent process is gone, even if the parent was killed before this call. Write the process id to
    `pid_file`.
    """
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    use_cpu(override=True)  # Grain imports JAX, but workers must not use a device
    disable_tokenizer_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="axlearn-parent-watch", daemon=True).start()
