"""Input for preference optimization: batches of pairs of answers.

Shapes: B pairs across all processes, S sequence length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import ConfigError, InputError, Problem, counted
from axlearn_plugins_finetune.objectives.preferences import PreferenceRecords
from axlearn_plugins_transformer.text.cycle import Cycle, Permutations
from axlearn_plugins_transformer.text.language_model import describe_encoding
from axlearn_plugins_transformer.text.long_texts import long_text_error
from axlearn_plugins_transformer.text.positions import OLD_ORDER, ORDER, is_current
from axlearn_plugins_transformer.text.protocols import bos_id_of, first_token, summarize_tokenizer
from axlearn_plugins_transformer.text.small_data import print_note
from axlearn_plugins_transformer.text.sources import Source, Split, describe, summarize
from axlearn_plugins_transformer.text.tokenizers import check_ids, special_tokens_problems, vocabulary_problems

Rows = dict[str, np.ndarray]
ANSWERS = ("chosen", "rejected")
DTYPES = {"tokens": "int32", "targets": "int32", "weights": "float32"}
SPLITS: tuple[Split, ...] = ("train", "validation")


class PreferenceInput(Configurable):
    """Batches of prompts with a chosen and a rejected answer.

    The arrays are `chosen_tokens`, `chosen_targets`, `chosen_weights`, and the same for `rejected`, each [B, S]. A row is
    `[bos, prompt..., answer...]`, and its targets are `[prompt..., answer..., eos]`. Without a BOS token, rows start with the
    end-of-document token. Weights are 1 for targets in the answer, including its end.
    """

    @node
    class Config(Configurable.Config["PreferenceInput"]):
        """Data source and batch shape.

        Attributes:
            batch_size: Pairs per batch, across all processes.
            sequence_length: Length of each of a pair's two rows.
            source: Source of preferences.
            tokenizer: Tokenizer of the prompts and answers.
            special_tokens: `text` treats special tokens in the data as plain text; `parse` converts them to tokens.
            shuffle: Whether to shuffle the training pairs.
            too_long: What to do with a pair that does not fit into its rows.
        """

        batch_size: int = setting(default=REQUIRED, gt=0, le=2**24)
        sequence_length: int = setting(default=REQUIRED, gt=0, le=2**24)
        source: Node[Source] = REQUIRED
        tokenizer: Node[Tokenizer] = REQUIRED
        special_tokens: Literal["text", "parse"] = setting(default="text", hide_default=True)
        shuffle: bool = True
        too_long: Literal["error", "drop"] = "error"

        def batch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
            """Return name -> (shape, dtype) of the arrays in a global batch. Does not read data."""
            shape = (self.batch_size, self.sequence_length)
            return {f"{answer}_{name}": (shape, dtype) for answer in ANSWERS for name, dtype in DTYPES.items()}

    def __init__(
        self,
        cfg: Config,
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
                    message=f"{counted(cfg.batch_size, 'pair')} cannot be split evenly over {process_count} processes",
                    expected=f"a multiple of {process_count}",
                )
            )
        problems += vocabulary_problems(self.tokenizer, vocab_size)
        problems += special_tokens_problems(self.tokenizer, cfg.special_tokens)
        share = cfg.batch_size // process_count
        self.rows = slice(process_index * share, (process_index + 1) * share)
        self.source = cfg.source.build(seed=seed)
        self.records = {split: _records(self.source, split) for split in SPLITS}
        if any(records is not None and not isinstance(records, PreferenceRecords) for records in self.records.values()):
            problems.append(
                Problem(
                    path="input.source",
                    message="is not a source of preferences",
                    got=type(cfg.source).__qualname__,
                    expected="preference-files",
                )
            )
        if problems:
            raise ConfigError(problems)
        self.pairs = {split: self._fitting_pairs(split) for split in SPLITS}

    def train(self) -> "PreferenceBatches":
        """Return batches endlessly. The batches of all processes form the global batch, and each pass has its own order.

        The pairs of a batch are distinct. If there are fewer pairs than the batch size, each batch has all pairs and repeats some.
        """
        rows, cfg = self._usable("train"), self.config
        if len(rows) < cfg.batch_size and self.rows.start == 0:
            print_note(
                f"the training data has {counted(len(rows), 'pair')} for batches of {cfg.batch_size}, "
                f"so every batch repeats pairs\n"
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
        """Return one pass over the held-out pairs in a fixed order. The last batch is padded with pairs of weight 0."""
        rows = self._usable("validation")
        return PreferenceBatches(self, "validation", lambda position, current: int(rows[position]), len(rows))

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run lock: files, bytes, a hash of names and sizes, the tokenizer hash, and the number of pairs."""
        return {
            **describe(self.source),
            "tokenizer": describe_encoding(self),
            "pairs": {s: len(self.pairs[s]) for s in SPLITS},
        }

    def summarize(self) -> Mapping[str, str]:
        """See `axlearn_core.contracts.capabilities.SummarizesData`."""
        return {"data": summarize(describe(self.source)), "tokenizer": summarize_tokenizer(self.tokenizer)}

    def pair(self, split: Split, index: int) -> Rows:
        """Return the six arrays of one pair, each [S]."""
        row = self._row(split, index)
        return {f"{a}_{name}": x for a in ANSWERS for name, x in self._answer(row["prompt"], row[a]).items()}

    def _answer(self, prompt: str, answer: str) -> Rows:
        prompt_ids, ids = self._encode(prompt), [*self._encode(answer), self.tokenizer.eos_id]
        if prompt_ids[:1] == [bos_id_of(self.tokenizer)]:  # the prompt already contains a BOS token
            prompt_ids = prompt_ids[1:]
        sequence = [first_token(self.tokenizer), *prompt_ids, *ids]
        columns = {
            "tokens": sequence[:-1],
            "targets": sequence[1:],
            "weights": [0.0] * len(prompt_ids) + [1.0] * len(ids),
        }
        return {n: _pad(v, self.config.sequence_length, DTYPES[n]) for n, v in columns.items()}

    def _encode(self, text: str) -> list[int]:
        tokenizer: Any = self.tokenizer
        ids = tokenizer.encode(text) if self.config.special_tokens == "text" else tokenizer.encode_special(text)[0]
        check_ids(self.tokenizer, ids, self.vocab_size, f"the text {text[:60]!r}")
        return ids

    def _row(self, split: Split, index: int) -> Any:
        records = self.records[split]
        assert records is not None
        return records[index][0].row

    def _length(self, split: Split, index: int) -> int:
        row = self._row(split, index)
        answers = (len(self._encode(row[a])) for a in ANSWERS)
        return 1 + len(self._encode(row["prompt"])) + max(answers)

    def _fitting_pairs(self, split: Split) -> np.ndarray:
        """Return the indices of pairs that fit into rows. Pairs that may be too long are tokenized before training starts."""
        records, limit = self.records[split], self.config.sequence_length
        if records is None:
            return np.zeros(0, np.int64)
        lengths = {i: self._length(split, i) for i in np.flatnonzero(records.sizes > limit // 2).tolist()}
        too_long = {i: length for i, length in lengths.items() if length > limit}
        if too_long and self.config.too_long == "error":
            raise long_text_error(
                "pair",
                [(records.name(i), length) for i, length in too_long.items()],
                total=len(records),
                limit=limit,
                sequence_length=limit,
                fix="set input.too_long to 'drop'",
            )
        return np.array([i for i in range(len(records)) if i not in too_long], np.int64)

    def _usable(self, split: Split) -> np.ndarray:
        if len(self.pairs[split]):
            return self.pairs[split]
        fix = "set the source's validation_paths or validation_fraction, or disable evaluation with evaluators={}"
        hint = f"\n    fix: {fix}" if split == "validation" else ""
        raise InputError(f"input.source has no {split} pairs{hint}")


class PreferenceBatches:
    """The iterator of `PreferenceInput` over this process's rows of each batch.

    Args:
        source: The input.
        split: The split to read.
        index: Function from (position, whether to use this version's order) to the index of a pair.
        count: Number of pairs. None for endless iteration.
    """

    def __init__(self, source: PreferenceInput, split: Split, index: Callable[[int, bool], int], count: int | None):
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
        pairs = [self._pair(position) for position in positions]
        return {name: np.stack([pair[name] for pair in pairs]) for name in pairs[0]}

    def _positions(self, batch: int) -> Sequence[int]:
        size = self._source.config.batch_size
        return range(batch * size, (batch + 1) * size)[self._source.rows]

    def _pair(self, position: int) -> Rows:
        if self._count is None or position < self._count:
            return self._source.pair(self._split, self._index(position, self._current))
        length = self._source.config.sequence_length
        return {f"{a}_{name}": np.zeros(length, dtype) for a in ANSWERS for name, dtype in DTYPES.items()}

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


def _records(source: Any, split: Split) -> Any:
    parts = source.parts(split)
    return parts[0].records if parts else None


def _pad(values: Iterable[Any], length: int, dtype: str) -> np.ndarray:
    values = np.asarray(values, dtype)
    return np.pad(values, (0, length - len(values)))
