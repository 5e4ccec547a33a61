"""The input of a language model: packed rows of tokens and targets.

Rows also have weights, segments and positions.

Legend: B global batch size, S sequence length, P processes, V vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from absl import flags

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.config.tree import children
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import get_digest
from axlearn_core.errors import ConfigError, InputError, Problem, counted
from axlearn_plugins_transformer.text.batch_iterator import Batches, Places
from axlearn_plugins_transformer.text.examples import Example, example
from axlearn_plugins_transformer.text.locate import find_source
from axlearn_plugins_transformer.text.positions import OLD_ORDER, check_position
from axlearn_plugins_transformer.text.protocols import (
    bos_id_of,
    bos_token_of,
    encodes_batches,
    first_token,
    summarize_tokenizer,
)
from axlearn_plugins_transformer.text.records import Document, FileRecords
from axlearn_plugins_transformer.text.shares import Shares
from axlearn_plugins_transformer.text.small_data import SmallData, is_small, print_note
from axlearn_plugins_transformer.text.sources import Part, Source, Split, describe, summarize
from axlearn_plugins_transformer.text.tokenizers import (
    check_ids,
    special_tokens_problems,
    token_bytes,
    vocabulary_problems,
)
from axlearn_plugins_transformer.text.workers import WorkerStream

CHARACTERS = 1 << 18
"""Maximum number of characters that a process tokenizes at once, across all shards and sources. A character takes about 100
bytes."""


class LanguageModelInput(Configurable):
    """Batches of documents for next-token prediction.

    A document `d` becomes inputs `[bos, d...]` and targets `[d..., eos]`, so every token is predicted once. If the tokenizer
    has no BOS token, the end-of-document token is used instead. Positions count from 0 in each piece of a document in a row.
    """

    @node
    class Config(Configurable.Config["LanguageModelInput"]):
        """Settings for the data and the batches.

        Rows and their order do not depend on `workers` or `prefetch`.

        Attributes:
            batch_size: Number of rows in the global batch.
            sequence_length: Tokens per row.
            source: Source of the documents.
            tokenizer: Tokenizer.
            special_tokens: Whether to parse special tokens that a document spells out (`<|endoftext|>`) or to treat them as
                text.
            packing: How to pack documents into rows: `concat`, `first-fit` or `none`.
            shuffle: Shuffle the documents.
            num_shards: Number of fixed streams that the rows come from. Any number of processes that divides it gives the
                same global batches. None uses one per row.
            workers: Worker processes that prepare batches. 0 uses a thread.
            prefetch: Number of batches to prepare ahead.
            worker_seconds: Time limit for a worker to prepare a batch, including its startup. A slower worker is replaced.
        """

        batch_size: int = setting(default=REQUIRED, gt=0, le=2**24)
        sequence_length: int = setting(default=REQUIRED, gt=0, le=2**24)
        source: Node[Source] = REQUIRED
        tokenizer: Node[Tokenizer] = REQUIRED
        special_tokens: Literal["text", "parse"] = setting(default="text", hide_default=True)
        packing: Literal["concat", "first-fit", "none"] = "concat"
        shuffle: bool = True
        num_shards: int | None = setting(default=None, gt=0)
        workers: int = setting(default=0, kind="execution", ge=0, le=1024)
        prefetch: int = setting(default=4, kind="execution", gt=0)
        worker_seconds: float = setting(default=300.0, kind="execution", gt=0, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Check that the number of shards divides the batch size."""
            if self.num_shards and self.batch_size % self.num_shards:
                yield Problem(
                    path="num_shards",
                    message=f"does not divide the batch size {self.batch_size}",
                    got=str(self.num_shards),
                    expected="a divisor of batch_size, or null for one shard per row",
                )

        def batch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
            """Return the arrays of a global training batch, name -> (shape, dtype).

            This does not read data.
            """
            shape = (self.batch_size, self.sequence_length)
            integers = ("tokens", "targets", "segment_ids", "positions")
            return {"weights": (shape, "float32"), **dict.fromkeys(integers, (shape, "int32"))}

    def __init__(
        self,
        cfg: Config,
        *,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        vocab_size: int | None = None,
    ):
        self.config, self.process_index, self.process_count = cfg, process_index, process_count
        self.num_shards = cfg.num_shards or cfg.batch_size
        problems = list(cfg.validate())
        if self.num_shards % process_count:
            problems.append(
                Problem(
                    path="input.num_shards" if cfg.num_shards else "input.batch_size",
                    message=f"{counted(self.num_shards, 'data shard')} cannot be split evenly over {process_count} processes",
                    expected=f"a multiple of {process_count}",
                )
            )
        self.tokenizer, self.vocab_size = cfg.tokenizer.build(), vocab_size
        self.first_token = first_token(self.tokenizer)
        problems += vocabulary_problems(self.tokenizer, vocab_size)
        problems += special_tokens_problems(self.tokenizer, cfg.special_tokens)
        if problems:
            raise ConfigError(problems)
        from axlearn_plugins_transformer.text import pipeline  # importing Grain takes a second, so only import it here

        self.order = pipeline.Order(seed % pipeline.SEEDS, cfg.shuffle, self.num_shards)
        self.packing = pipeline.Packing(cfg.packing, cfg.sequence_length)
        self.source = cfg.source.build(seed=seed)

    def example(self, document: Document) -> Example | None:
        """Return the example for a document, or None to skip it.

        Override this method to change inputs, targets or weights.
        """
        return self._example(document, self._encode([document.text])[0])

    def _example(self, document: Document, ids: list[int]) -> Example | None:
        check_ids(self.tokenizer, ids, self.vocab_size, f"the document {document.text[:60]!r}")
        if ids[:1] == [bos_id_of(self.tokenizer)]:  # the document begins with BOS already
            ids = ids[1:]
        ids = ids + [self.tokenizer.eos_id] * document.ends
        return example([self.first_token, *ids[:-1]], ids) if ids else None

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer: Any = self.tokenizer
        if self.config.special_tokens == "parse":
            return [tokenizer.encode_special(text)[0] for text in texts]
        return tokenizer.encode_batch(texts) if encodes_batches(tokenizer) else [tokenizer.encode(t) for t in texts]

    def examples(self, documents: Sequence[Document], start: int = 0, characters: int = 0) -> list[Example | None]:
        """Return the examples of the document at `start`.

        The result includes the following documents if they are tokenized together with it. If a subclass overrides `example`,
        documents are converted one by one.

        Args:
            documents: Documents of a record.
            start: Index of the first document.
            characters: Maximum total length of the documents. A longer first document is tokenized alone.

        Raises:
            InputError: The tokenizer fails on the first document. If it fails on a later one, that document and the
                following ones are omitted.
        """
        if type(self).example is not LanguageModelInput.example or not encodes_batches(self.tokenizer):
            return [self.example(documents[start])]
        sizes = itertools.accumulate(len(documents[i].text) for i in range(start, len(documents)))
        count = sum(1 for _ in itertools.takewhile(lambda size: size <= characters, sizes))
        batch = documents[start : start + max(1, count)]
        try:
            ids = self._encode([d.text for d in batch])
        except InputError:  # one of them fails; first return the documents before it
            return self._encode_until_failure(batch)
        return [self._example(d, i) for d, i in zip(batch, ids, strict=True)]

    def _encode_until_failure(self, documents: Sequence[Document]) -> list[Example | None]:
        examples = [self.example(documents[0])]
        with contextlib.suppress(InputError):
            for document in documents[1:]:
                examples.append(self.example(document))
        return examples

    def train(self) -> Batches:
        """Return endless batches of B / P rows per process.

        The rows of all processes, in order, form the global batch.
        """
        from axlearn_plugins_transformer.text import pipeline

        cfg, parts, share = self.config, self._parts("train"), self.num_shards // self.process_count
        local_shards = range(self.process_index * share, (self.process_index + 1) * share)

        shares = Shares.from_weights([part.weight for part in parts], self.num_shards)
        tokens = cfg.batch_size * cfg.sequence_length
        train_parts = [p if is_small(p.records, tokens) else self._with_rows(p) for p in parts]
        small = [is_small(p.records, tokens) for p in train_parts]

        def shards(ids: Sequence[int], current: bool) -> Any:
            characters = CHARACTERS // (len(ids) * len(parts))  # each shard reads ahead separately
            encode = functools.partial(self.examples, characters=characters)
            report = print_note if 0 in ids else None
            if current:
                data = [self._small_data(p, i, shares, report) if small[i] else p for i, p in enumerate(train_parts)]
                rows = {i: pipeline.training_rows(data, encode, self.packing, self.order, shares, i) for i in ids}
            else:
                if report:
                    report(OLD_ORDER)
                rows = {i: pipeline.training_rows_of_order_1(parts, encode, self.packing, self.order, i) for i in ids}
            return pipeline.Shards(rows, cfg.batch_size // self.num_shards, stack_rows, current=current)

        streams = functools.partial(self._streams, shards, local_shards)
        return Batches(
            streams(True),
            workers=bool(cfg.workers),
            identify=functools.partial(_list_records, train_parts, parts, self.order),
            locate=functools.partial(find_source, self, train_parts, self.order),
            remake=streams,
            check=functools.partial(check_position, small=small),
        )

    def _streams(
        self, shards: Callable[[Sequence[int], bool], Any], local_shards: Sequence[int], current: bool
    ) -> dict[tuple[int, ...], Any]:
        """Return the iterators of this process, keyed by the shards that each reads."""
        import grain
        from grain import experimental

        from axlearn_plugins_transformer.text import pipeline

        cfg = self.config
        if not cfg.workers:
            rows = shards(local_shards, current)
            prefetched = experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=cfg.prefetch)
            return {tuple(local_shards): iter(prefetched)}
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags; use their defaults
        options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=cfg.prefetch)
        count = min(cfg.workers, len(local_shards))
        groups = [tuple(g.tolist()) for g in np.array_split(np.array(local_shards), count)]

        def stream(group: Sequence[int], pid_file: str) -> Any:
            start = functools.partial(pipeline.start_worker, pid_file)
            return iter(shards(group, current).mp_prefetch(options, start))

        return {g: WorkerStream(functools.partial(stream, g), g, cfg.worker_seconds) for g in groups}

    def _small_data(self, part: Part, index: int, shares: Shares, report: Callable[[str], None] | None) -> SmallData:
        from axlearn_plugins_transformer.text import pipeline

        encode = functools.partial(pipeline.all_examples, functools.partial(self.examples, characters=CHARACTERS))
        window, seed = shares.most(index, self.config.batch_size), self.order.for_part(index)
        cfg, only_part = self.config, len(shares.proportions) == 1
        return SmallData(part, encode, cfg.packing, cfg.sequence_length, window, seed, cfg.shuffle, report, only_part)

    def _with_rows(self, part: Part) -> Part:
        """Drop records that do not produce any rows.

        A shard that skipped such a record would read the same record as another shard.
        """
        records = part.records
        return attrs.evolve(part, records=records.with_lines()) if isinstance(records, FileRecords) else part

    def evaluation(self) -> Batches:
        """Return one pass over the held-out data in a fixed order.

        The last batch is padded with rows of weight 0.

        Batches have an additional array `bytes` (float32 [B, S]), the number of text bytes of each target, for losses
        per byte. Every process reads all data and keeps its own rows, so all processes have the same number of batches.
        """
        from grain import experimental

        from axlearn_plugins_transformer.text import pipeline

        cfg, share = self.config, self.config.batch_size // self.process_count
        local_rows = slice(self.process_index * share, (self.process_index + 1) * share)
        encode = functools.partial(self.examples, characters=CHARACTERS)
        rows = pipeline.evaluation_rows(self._parts("validation"), encode, self.packing)
        pad = functools.partial(experimental.batch_and_pad, batch_size=cfg.batch_size)
        batches = rows.batch(cfg.batch_size, batch_fn=pad).map(
            functools.partial(_share, local_rows, token_bytes(self.tokenizer))
        )
        shards = pipeline.Shards({0: batches}, 1, only_batch)
        prefetched = experimental.ThreadPrefetchIterDataset(shards, prefetch_buffer_size=cfg.prefetch)
        return Batches({(0,): iter(prefetched)})

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run lock.

        They are the facts of the source (see `sources.describe`), the tokenizer's digest and settings, and the number of shards.
        """
        return {**describe(self.source), "tokenizer": describe_encoding(self), "num_shards": self.num_shards}

    def summarize(self) -> Mapping[str, str]:
        """See `axlearn_core.contracts.capabilities.SummarizesData`."""
        return {"data": summarize(describe(self.source)), "tokenizer": summarize_tokenizer(self.tokenizer)}

    def _parts(self, split: Split) -> tuple[Part, ...]:
        parts = self.source.parts(split)
        if not parts:
            if split == "train":
                raise InputError("input.source has no train data")
            share = children(self.config.source).get("validation_fraction", 0)
            details = (
                f"\n    got: validation_fraction {share}, which selects no chunk of so little text" if share else ""
            )
            fix = (
                "raise it, or lower chunk_bytes"
                if share
                else "set the source's validation_paths or validation_fraction"
            )
            raise InputError(
                f"input.source has no {split} data{details}\n    fix: {fix}; to train without evaluation: evaluators={{}}"
            )
        from axlearn_plugins_transformer.text import pipeline

        for part in parts:
            pipeline.check_text(part.records)  # reports an invalid first record before training starts
        return parts


def describe_encoding(source: Any) -> str:
    """Describe how an input tokenizes text, for the run lock.

    Includes the tokenizer, the BOS token and the special tokens.
    """
    bos = bos_token_of(source.tokenizer)
    parts = [get_digest(source.tokenizer), *([] if bos is None else [f"documents begin with {bos!r}"])]
    if children(source.config).get("special_tokens") == "parse":
        parts.append("special tokens in documents are parsed")
    return ", ".join(parts)


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack packed rows into a batch; see `Batch` in `contracts.parts`."""
    return _unpack({k: np.stack([row[k] for row in rows]) for k in rows[0]})


def only_batch(batches: Sequence[Any]) -> Any:
    """Return the only batch."""
    return batches[0]


def _unpack(stacked: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    tokens, targets, weights = (np.ascontiguousarray(stacked["tokens"][..., i]) for i in range(3))
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": weights.view(np.float32),
        "segment_ids": stacked["tokens_segment_ids"],
        "positions": stacked["tokens_positions"],
    }


def _share(rows: slice, sizes: np.ndarray, stacked: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    batch = _unpack({k: v[rows] for k, v in stacked.items()})
    return {**batch, "bytes": sizes[batch["targets"]] * (batch["weights"] > 0)}


def _list_records(
    current_parts: Sequence[Part], parts: Sequence[Part], order: Any, places: Places, current: bool
) -> dict[str, Any]:
    """Return the record in which each shard's rows begin, and the next record.

    If the first record is used up, rows begin in the next one.
    """
    names: dict[str, list[str]] = {}
    for shard, part_places in places.items():
        for i, (part, place) in enumerate(zip(current_parts if current else parts, part_places, strict=True)):
            if isinstance(place, int):
                record_name = order.names(part.records, i, int(shard), current)
                listing = [record_name(place + k) for k in (0, 1)]
            else:
                listing = [part.records.name(record) for record in place]
            names.setdefault(shard, []).extend(listing)
    return {"records": names}
