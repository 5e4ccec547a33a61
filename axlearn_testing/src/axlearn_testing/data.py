"""The suite for inputs."""

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
"""The dtypes of the arrays that `axlearn_core.contracts.parts.Batch` names."""


class InputSuite:
    """What every input keeps.

    Attributes:
        config: the input, over data that is small enough to be read to its end.
        vocab_size: of the model that it is for.
        dtypes: of arrays in addition to those of a language model, by name.
        batches: how many training batches are looked at.
        processes: the number of processes that its rows are divided among.
    """

    config: Node[Any]
    vocab_size: int | None = None
    dtypes: Mapping[str, str] = {}
    batches: int = 4
    processes: int = 2

    def build(self, seed: int = 0, index: int = 0, count: int = 1) -> Any:
        """The input of one process."""
        return self.config.build(seed=seed, process_index=index, process_count=count, vocab_size=self.vocab_size)

    def training(self, source: Any, count: int | None = None) -> list[dict[str, np.ndarray]]:
        """The first batches."""
        iterator = source.train()
        try:
            return list(itertools.islice(iterator, count or self.batches))
        finally:
            iterator.close()

    def evaluated(self, source: Any) -> list[dict[str, np.ndarray]]:
        """All batches of one evaluation."""
        iterator = source.evaluation()
        try:
            batches = list(itertools.islice(iterator, 1000))
        finally:
            iterator.close()
        assert len(batches) < 1000, "an evaluation ends; this one has more than a thousand batches"
        return batches

    def test_batches_have_the_promised_arrays(self) -> None:
        source = self.build()
        training, evaluation = self.training(source), self.evaluated(source)
        assert evaluation, "an evaluation of no batches"
        dtypes = {**LANGUAGE_MODEL, **self.dtypes}
        first = training[0]
        assert len({str(describe([b])) for b in training}) > 1, "every batch of training is the first one again"
        for batch in (*training, *evaluation):
            rows = {k: x.shape[0] for k, x in batch.items()}
            assert len(set(rows.values())) == 1, f"arrays of one batch have as many rows: {rows}"
            assert {k: str(x.dtype) for k, x in batch.items() if k in dtypes} == {
                k: dtypes[k] for k in batch if k in dtypes
            }
            same = {k: batch[k].shape for k in first if k in batch}
            assert same == {k: x.shape for k, x in first.items()}, "every batch has the shapes and arrays of the first"
            if {"tokens", "targets"} <= batch.keys():
                self._follow(batch)

    def _follow(self, batch: Mapping[str, np.ndarray]) -> None:
        """The target of a token is the token after it, within a document."""
        tokens, targets = batch["tokens"], batch["targets"]
        if self.vocab_size is not None:
            assert tokens.min() >= 0, "token ids are not negative"
            assert max(tokens.max(), targets.max()) < self.vocab_size, "token ids are below vocab_size"
        ids = batch.get("segment_ids", np.ones_like(tokens))
        within = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        assert (tokens[:, 1:] == targets[:, :-1])[within].all(), "the target of a token is the token after it"
        if "positions" in batch:
            steps = np.diff(batch["positions"], axis=1)
            assert (steps[within] == 1).all(), "positions count up within a document"
        if {"segment_ids", "weights"} <= batch.keys():
            assert (batch["weights"][ids == 0] == 0).all(), "padding has the weight 0"

    def test_equal_seeds_give_equal_streams(self) -> None:
        one, two, other = (self.training(self.build(seed)) for seed in (3, 3, 4))
        assert_batches(one, two)
        assert describe(one) != describe(other), "another seed gives another stream"

    def test_a_state_continues_exactly(self) -> None:
        source = self.build()
        iterator = source.train()
        expected, states = [], [iterator.get_state()]
        for _ in range(self.batches):
            expected.append(next(iterator))
            states.append(iterator.get_state())
        for at in range(self.batches):
            fresh = self.build().train()
            fresh.set_state(json.loads(json.dumps(states[at])))  # as a checkpoint keeps it
            assert_batches(list(itertools.islice(fresh, self.batches - at)), expected[at:])
            fresh.close()
        iterator.set_state(states[1])  # back, without a new iterator
        assert_batches([next(iterator)], expected[1:2])
        iterator.close()

    def test_evaluation_repeats(self) -> None:
        source = self.build()
        assert_batches(self.evaluated(source), self.evaluated(source))
        assert_batches(self.evaluated(source), self.evaluated(self.build(seed=5)))  # the order is fixed

    def test_processes_share_the_rows(self) -> None:
        whole = self.build()
        try:
            parts = [self.build(index=i, count=self.processes) for i in range(self.processes)]
        except ConfigError as error:
            pytest.skip(f"it refuses {self.processes} processes: {error}")
        for take in (self.training, self.evaluated):
            global_batches = [
                {k: np.concatenate([b[k] for b in rows]) for k in rows[0]}
                for rows in zip(*(take(part) for part in parts), strict=True)
            ]
            assert_batches(global_batches, take(whole))

    def test_it_describes_itself_for_the_lock(self) -> None:
        one, two = (dict(self.build(seed).describe()) for seed in (0, 5))
        assert json.loads(json.dumps(one)) == json.loads(json.dumps(two)), "facts of the data depend on nothing else"

    def test_closing_ends_it(self) -> None:
        iterator = self.build().train()
        next(iterator)
        iterator.close()
        iterator.close()  # an error path may close what is closed


def describe(batches: Iterable[Mapping[str, np.ndarray]]) -> list[dict[str, bytes]]:
    """The batches as values that compare."""
    return [{k: np.asarray(x).tobytes() for k, x in sorted(b.items())} for b in batches]


def assert_batches(got: list[Any], expected: list[Any]) -> None:
    """Compares two lists of batches exactly."""
    assert len(got) == len(expected)
    for i, (one, two) in enumerate(zip(got, expected, strict=True)):
        assert one.keys() == two.keys()
        for key, x in two.items():
            np.testing.assert_array_equal(one[key], x, err_msg=f"batch {i}, {key}")
