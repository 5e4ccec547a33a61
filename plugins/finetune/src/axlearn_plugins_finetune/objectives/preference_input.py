"""Inputs for preference optimization: batches of prompts with answers.

Shapes: B rows across all processes, S sequence length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import ConfigError, InputError, Problem, counted
from axlearn_plugins_finetune.objectives.answer_encoder import AnswerEncoder
from axlearn_plugins_finetune.objectives.preferences import PreferenceFiles
from axlearn_plugins_transformer.text.conversations import ChatFiles
from axlearn_plugins_transformer.text.cycle import Cycle, Permutations
from axlearn_plugins_transformer.text.language_model import describe_encoding
from axlearn_plugins_transformer.text.long_texts import long_text_error
from axlearn_plugins_transformer.text.positions import OLD_ORDER, ORDER, is_current
from axlearn_plugins_transformer.text.protocols import summarize_tokenizer
from axlearn_plugins_transformer.text.small_data import print_note
from axlearn_plugins_transformer.text.sources import Source, Split, describe, summarize
from axlearn_plugins_transformer.text.tokenizers import special_tokens_problems, vocabulary_problems

Rows = dict[str, np.ndarray]
BatchShapes = dict[str, tuple[tuple[int, ...], str]]
ReadRow = Callable[[], Mapping[str, Any] | None]
ANSWERS = ("chosen", "rejected")
DTYPES = {"tokens": "int32", "targets": "int32", "weights": "float32"}
SPLITS: tuple[Split, ...] = ("train", "validation")


T_co = TypeVar("T_co", covariant=True)


class AnswerInput(Configurable):
    """Base of inputs whose rows have a prompt and answers. A subclass sets the class attributes and implements `arrays`.

    A row is `[bos, prompt..., answer...]`, and its targets are `[prompt..., answer..., eos]`. Without a BOS token, rows start with
    the end-of-document token. Weights are 1 for targets in the answer, including its end.
    """

    @node
    class Config(Configurable.Config[T_co]):
        """Data source and batch shape.

        Attributes:
            batch_size: Rows of the source per batch, across all processes.
            sequence_length: Length of a prompt with an answer, in tokens.
            source: Source of the rows.
            tokenizer: Tokenizer of the prompts and answers.
            special_tokens: `text` treats special tokens in the data as plain text; `parse` converts them to tokens.
            shuffle: Whether to shuffle the training rows.
            too_long: What to do with a row of the source that is longer than `sequence_length`.
        """

        batch_size: int = setting(default=REQUIRED, gt=0, le=2**24)
        sequence_length: int = setting(default=REQUIRED, gt=0, le=2**24)
        source: Node[Source] = REQUIRED
        tokenizer: Node[Tokenizer] = REQUIRED
        special_tokens: Literal["text", "parse"] = setting(default="text", hide_default=True)
        shuffle: bool = True
        too_long: Literal["error", "drop"] = "error"

        def batch_shapes(self) -> BatchShapes:
            """Return name -> (shape, dtype) of the arrays in a global batch. Does not read data."""
            raise NotImplementedError

    fields: ClassVar[tuple[str, ...]]
    """Fields of a row of the source that contain answers."""
    unit: ClassVar[str]
    """Noun for a row of the source, for messages."""
    source_type: ClassVar[type[ChatFiles]]
    """The source that reads the rows."""
    source_name: ClassVar[str]
    """The registered name of `source_type`."""

    def __init__(
        self,
        cfg: Config[Any],
        *,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        vocab_size: int | None = None,
    ):
        self.config, self.seed = cfg, seed
        self.tokenizer, self.vocab_size = cfg.tokenizer.build(), vocab_size
        problems = []
        if cfg.batch_size % process_count:
            problems.append(
                Problem(
                    path="input.batch_size",
                    message=f"{counted(cfg.batch_size, self.unit)} cannot be split evenly over {process_count} processes",
                    expected=f"a multiple of {process_count}",
                )
            )
        problems += vocabulary_problems(self.tokenizer, vocab_size)
        problems += special_tokens_problems(self.tokenizer, cfg.special_tokens)
        self.encoder = AnswerEncoder(self.tokenizer, cfg.special_tokens, vocab_size)
        share = cfg.batch_size // process_count
        self.rows = slice(process_index * share, (process_index + 1) * share)
        self.source = cfg.source.build(seed=seed)
        self.records = {split: _records(self.source, split) for split in SPLITS}
        kind = self.source_type.records
        if any(records is not None and not isinstance(records, kind) for records in self.records.values()):
            problems.append(
                Problem(
                    path="input.source",
                    message=f"is not a source of {self.unit}s",
                    got=type(cfg.source).__qualname__,
                    expected=self.source_name,
                )
            )
        if problems:
            raise ConfigError(problems)
        self.usable = {split: self._fitting_rows(split) for split in SPLITS}

    def train(self) -> "PreferenceBatches":
        """Return batches endlessly. The batches of all processes form the global batch, and each pass has its own order.

        The rows of a batch are distinct. If there are fewer rows than the batch size, each batch has all rows and repeats some.
        """
        rows, cfg = self._usable("train"), self.config
        if len(rows) < cfg.batch_size and self.rows.start == 0:
            print_note(
                f"the training data has {counted(len(rows), self.unit)} for batches of {cfg.batch_size}, "
                f"so every batch repeats {self.unit}s\n"
                f"    fix: add data, or set input.batch_size={len(rows)}"
            )
        permutation = Permutations(len(rows), self.seed) if cfg.shuffle else None
        order = Cycle(len(rows), cfg.batch_size, self.seed, permutation)

        def index(position: int, current: bool) -> int:
            if permutation is None or current:
                return int(rows[order(position)])
            return int(rows[permutation(position)])

        return PreferenceBatches(self, "train", index, None)

    def evaluation(self) -> "PreferenceBatches":
        """Return one pass over the held-out rows in a fixed order. The last batch is padded with rows of weight 0."""
        rows = self._usable("validation")
        return PreferenceBatches(self, "validation", lambda position, current: int(rows[position]), len(rows))

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run lock: files, bytes, a hash of names and sizes, the tokenizer hash, and the number of rows."""
        return {
            **describe(self.source),
            "tokenizer": describe_encoding(self),
            f"{self.unit}s": {s: len(self.usable[s]) for s in SPLITS},
        }

    def summarize(self) -> Mapping[str, str]:
        """See `axlearn_core.contracts.capabilities.SummarizesData`."""
        return {"data": summarize(describe(self.source)), "tokenizer": summarize_tokenizer(self.tokenizer)}

    def arrays(self, row: Mapping[str, Any], read_next: ReadRow) -> Rows:
        """Return the arrays of a row of the source, without a batch dimension.

        Args:
            row: The row.
            read_next: Reads the next row of the batch: the first row, after the last one. Returns None if there is only one row.
        """
        raise NotImplementedError

    def padding(self) -> Rows:
        """Return the arrays of a row that does not count."""
        return {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in self.config.batch_shapes().items()}

    def record(self, split: Split, index: int) -> Mapping[str, Any]:
        """Return a row of the source."""
        records = self.records[split]
        assert records is not None
        return records[index][0].row

    def _length(self, split: Split, index: int) -> int:
        row = self.record(split, index)
        answers = (len(self.encoder.encode(row[a])) for a in self.fields)
        return 1 + len(self.encoder.encode(row["prompt"])) + max(answers)

    def encode_answer(self, prompt: str, answer: str) -> Rows:
        """Return `tokens`, `targets` and `weights`, [S]. An answer that is too long loses its end."""
        length = self.config.sequence_length
        sequence, count = self.encoder.join(prompt, answer)
        columns = {
            "tokens": sequence[:-1],
            "targets": sequence[1:],
            "weights": [0.0] * (count - 1) + [1.0] * (len(sequence) - count),
        }
        return {n: _pad(v[:length], length, DTYPES[n]) for n, v in columns.items()}

    def _fitting_rows(self, split: Split) -> np.ndarray:
        """Return the indices of rows that are short enough. Rows that may be too long are tokenized before training starts."""
        records, limit = self.records[split], self.config.sequence_length
        if records is None:
            return np.zeros(0, np.int64)
        lengths = {i: self._length(split, i) for i in np.flatnonzero(records.sizes > limit // 2).tolist()}
        too_long = {i: length for i, length in lengths.items() if length > limit}
        if too_long and self.config.too_long == "error":
            raise long_text_error(
                self.unit,
                [(records.name(i), length) for i, length in too_long.items()],
                total=len(records),
                limit=limit,
                sequence_length=limit,
                fix="set input.too_long to 'drop'",
            )
        return np.array([i for i in range(len(records)) if i not in too_long], np.int64)

    def _usable(self, split: Split) -> np.ndarray:
        if len(self.usable[split]):
            return self.usable[split]
        fix = "set the source's validation_paths or validation_fraction, or disable evaluation with evaluators={}"
        hint = f"\n    fix: {fix}" if split == "validation" else ""
        raise InputError(f"input.source has no {split} {self.unit}s{hint}")


class PreferenceInput(AnswerInput):
    """Batches of prompts with a chosen and a rejected answer.

    The arrays are `chosen_tokens`, `chosen_targets`, `chosen_weights`, and the same for `rejected`, each [B, S]. See `AnswerInput`
    for their contents.
    """

    @node
    class Config(AnswerInput.Config["PreferenceInput"]):
        """Data source and batch shape. `batch_size` counts pairs."""

        def batch_shapes(self) -> BatchShapes:
            """See `AnswerInput.Config.batch_shapes`."""
            return answer_shapes(ANSWERS, self.batch_size, self.sequence_length)

    fields = ANSWERS
    unit = "pair"
    source_type, source_name = PreferenceFiles, "preference-files"

    def arrays(self, row: Mapping[str, Any], read_next: ReadRow) -> Rows:
        """See `AnswerInput.arrays`."""
        return {f"{a}_{name}": x for a in ANSWERS for name, x in self.encode_answer(row["prompt"], row[a]).items()}


class PreferenceBatches:
    """The iterator of an `AnswerInput` over this process's rows of each batch.

    Args:
        source: The input.
        split: The split to read.
        index: Function from (position, whether to use this version's order) to the index of a row.
        count: Number of rows. None for endless iteration.
    """

    def __init__(self, source: AnswerInput, split: Split, index: Callable[[int, bool], int], count: int | None):
        self._source, self._index, self._count = source, index, count
        self._split: Split = split
        self._batch, self._current = 0, True

    def __iter__(self) -> Iterator[Rows]:
        return self

    def __next__(self) -> Rows:
        positions = self._positions(self._batch)
        if self._count is not None and self._batch * self._source.config.batch_size >= self._count:
            raise StopIteration
        self._batch += 1
        rows = [self._row(position) for position in positions]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _positions(self, batch: int) -> Sequence[int]:
        size = self._source.config.batch_size
        return range(batch * size, (batch + 1) * size)[self._source.rows]

    def _row(self, position: int) -> Rows:
        if self._count is not None and position >= self._count:
            return self._source.padding()
        size = self._source.config.batch_size
        start = position // size * size
        end = start + size if self._count is None else min(start + size, self._count)
        following = position + 1 if position + 1 < end else start
        return self._source.arrays(
            self._record(position), lambda: None if following == position else self._record(following)
        )

    def _record(self, position: int) -> Mapping[str, Any]:
        return self._source.record(self._split, self._index(position, self._current))

    def describe_position(self) -> str:
        """Return the file and line of each row of the latest batch."""
        records = self._source.records[self._split]
        assert records is not None
        positions = [p for p in self._positions(max(self._batch - 1, 0)) if self._count is None or p < self._count]
        names = [records.name(self._index(p, self._current)) for p in positions[:3]]
        return "; ".join(names) + (f"; and {len(positions) - 3} more" if len(positions) > 3 else "")

    def get_state(self) -> Any:
        """Return the number of returned batches, and the version of the order."""
        return {"batches": self._batch, **({"order": ORDER} if self._current else {})}

    def set_state(self, state: Any) -> None:
        """Restore a position from `get_state`."""
        self._batch, self._current = int(state["batches"]), is_current(state)
        if self._count is None and self._source.rows.start == 0 and not self._current:
            print_note(OLD_ORDER)

    def close(self) -> None:
        """Do nothing. The input does no background work."""


def answer_shapes(answers: Iterable[str], batch_size: int, length: int) -> BatchShapes:
    """Return name -> (shape, dtype) of the arrays of answers in a global batch."""
    return {f"{answer}_{name}": ((batch_size, length), dtype) for answer in answers for name, dtype in DTYPES.items()}


def _records(source: Any, split: Split) -> Any:
    parts = source.parts(split)
    return parts[0].records if parts else None


def _pad(values: Iterable[Any], length: int, dtype: str) -> np.ndarray:
    values = np.asarray(values, dtype)
    return np.pad(values, (0, length - len(values)))
