"""Suite for inputs."""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from axlearn_core.config import Node
from axlearn_core.errors import ConfigError

LANGUAGE_MODEL = {
    "tokens": "int32",
    "targets": "int32",
    "weights": "float32",
    "segment_ids": "int32",
    "positions": "int32",
    "bytes": "float32",
}
"""Dtypes of the arrays in `axlearn_core.contracts.parts.Batch`."""


class InputSuite:
    """Tests that every input must pass.

    Attributes:
        config: Config of the input, with a data set small enough to be read to the end.
        vocab_size: Vocabulary size of the model.
        dtypes: Array name -> dtype, in addition to the arrays of a language model.
        batches: Number of training batches to check.
        processes: Number of processes to divide the rows among.
    """

    config: Node[Any]
    vocab_size: int | None = None
    dtypes: Mapping[str, str] = {}
    batches: int = 4
    processes: int = 2

    def build(self, seed: int = 0, index: int = 0, count: int = 1) -> Any:
        """Build the input of one process."""
        return self.config.build(seed=seed, process_index=index, process_count=count, vocab_size=self.vocab_size)

    def training_batches(self, source: Any, count: int | None = None) -> list[dict[str, np.ndarray]]:
        """Return the first training batches."""
        iterator = source.train()
        try:
            return list(itertools.islice(iterator, count or self.batches))
        finally:
            iterator.close()

    def evaluation_batches(self, source: Any) -> list[dict[str, np.ndarray]]:
        """Return all batches of one evaluation."""
        iterator = source.evaluation()
        try:
            batches = list(itertools.islice(iterator, 1000))
        finally:
            iterator.close()
        assert len(batches) < 1000, "an evaluation must end, but this one has more than a thousand batches"
        return batches

    def test_batches_match_declared_arrays(self) -> None:
        source = self.build()
        training, evaluation = self.training_batches(source), self.evaluation_batches(source)
        assert evaluation, "the evaluation has no batches"
        dtypes = {**LANGUAGE_MODEL, **self.dtypes}
        first = training[0]
        assert len({str(describe([b])) for b in training}) > 1, "all training batches are identical"
        for batch in (*training, *evaluation):
            rows = {k: x.shape[0] for k, x in batch.items()}
            assert len(set(rows.values())) == 1, f"the arrays of a batch must have the same number of rows: {rows}"
            assert {k: str(x.dtype) for k, x in batch.items() if k in dtypes} == {
                k: dtypes[k] for k in batch if k in dtypes
            }
            same = {k: batch[k].shape for k in first if k in batch}
            assert same == {k: x.shape for k, x in first.items()}, "all batches must have the same arrays and shapes"
            if {"tokens", "targets"} <= batch.keys():
                self._follow(batch)

    def _follow(self, batch: Mapping[str, np.ndarray]) -> None:
        """Check that the target of a token is the next token of its document."""
        tokens, targets = batch["tokens"], batch["targets"]
        if self.vocab_size is not None:
            assert tokens.min() >= 0, "token ids must not be negative"
            assert max(tokens.max(), targets.max()) < self.vocab_size, "token ids must be below vocab_size"
        ids = batch.get("segment_ids", np.ones_like(tokens))
        within = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        assert (tokens[:, 1:] == targets[:, :-1])[within].all(), "the target of a token must be the next token"
        if "positions" in batch:
            steps = np.diff(batch["positions"], axis=1)
            assert (steps[within] == 1).all(), "positions must count up within a document"
        if {"segment_ids", "weights"} <= batch.keys():
            assert (batch["weights"][ids == 0] == 0).all(), "padding must have weight 0"

    def test_equal_seeds_give_equal_streams(self) -> None:
        one, two, other = (self.training_batches(self.build(seed)) for seed in (3, 3, 4))
        assert_batches(one, two)
        assert describe(one) != describe(other), "different seeds must give different streams"

    def test_restored_state_continues_exactly(self) -> None:
        source = self.build()
        iterator = source.train()
        expected, states = [], [iterator.get_state()]
        for _ in range(self.batches):
            expected.append(next(iterator))
            states.append(iterator.get_state())
        for start in range(self.batches):
            fresh = self.build().train()
            fresh.set_state(json.loads(json.dumps(states[start])))  # as after a checkpoint
            assert_batches(list(itertools.islice(fresh, self.batches - start)), expected[start:])
            fresh.close()
        iterator.set_state(states[1])  # go back with the same iterator
        assert_batches([next(iterator)], expected[1:2])
        iterator.close()

    def test_evaluation_repeats(self) -> None:
        source = self.build()
        assert_batches(self.evaluation_batches(source), self.evaluation_batches(source))
        assert_batches(
            self.evaluation_batches(source), self.evaluation_batches(self.build(seed=5))
        )  # the order is fixed

    def test_processes_share_the_rows(self) -> None:
        full_input = self.build()
        try:
            parts = [self.build(index=i, count=self.processes) for i in range(self.processes)]
        except ConfigError as error:
            pytest.skip(f"needs an input for {self.processes} processes: {error}")
        for take in (self.training_batches, self.evaluation_batches):
            global_batches = [
                {k: np.concatenate([b[k] for b in rows]) for k in rows[0]}
                for rows in zip(*(take(part) for part in parts), strict=True)
            ]
            assert_batches(global_batches, take(full_input))

    def test_describe_depends_only_on_data(self) -> None:
        one, two = (dict(self.build(seed).describe()) for seed in (0, 5))
        assert json.loads(json.dumps(one)) == json.loads(json.dumps(two)), "describe() must depend only on the data"

    def test_close_is_idempotent(self) -> None:
        iterator = self.build().train()
        next(iterator)
        iterator.close()
        iterator.close()  # error paths may close an iterator twice


def describe(batches: Iterable[Mapping[str, np.ndarray]]) -> list[dict[str, bytes]]:
    """Return the batches as values that can be compared."""
    return [{k: np.asarray(x).tobytes() for k, x in sorted(b.items())} for b in batches]


def assert_batches(got: list[Any], expected: list[Any]) -> None:
    """Assert that two lists of batches are equal."""
    assert len(got) == len(expected)
    for i, (one, two) in enumerate(zip(got, expected, strict=True)):
        assert one.keys() == two.keys()
        for key, x in two.items():
            np.testing.assert_array_equal(one[key], x, err_msg=f"batch {i}, {key}")
