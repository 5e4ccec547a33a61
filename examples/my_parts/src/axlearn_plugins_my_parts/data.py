"""The `copy-task` component."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.extend import ConfigError, Configurable, Problem, node, setting


class CopyTask(Configurable):
    """Rows of random tokens followed by the same tokens. The loss only counts the copy."""

    @node
    class Config(Configurable.Config["CopyTask"]):
        """Settings for `CopyTask`.

        Attributes:
            batch_size: Rows per global batch.
            copied: Number of tokens to repeat in each row.
            evaluation_batches: Number of batches per evaluation.
        """

        batch_size: int = setting(default=8, ge=1)
        copied: int = setting(default=8, ge=1)
        evaluation_batches: int = setting(default=2, ge=1)

        def batch_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
            """Return the shape and dtype of each array of the global batch."""
            shape = (self.batch_size, 2 * self.copied - 1)
            return {"tokens": (shape, "int32"), "targets": (shape, "int32"), "weights": (shape, "float32")}

    def __init__(self, cfg: Config, *, seed: int, process_index: int, process_count: int, vocab_size: int):
        if cfg.batch_size % process_count:
            expected = f"a multiple of {process_count}"
            got, message = f"{cfg.batch_size} rows", "is not divisible by the number of processes"
            raise ConfigError(Problem(path="input.batch_size", message=message, got=got, expected=expected))
        self.cfg, self.seed, self.vocab_size = cfg, seed, vocab_size
        self.rows = np.split(np.arange(cfg.batch_size), process_count)[process_index]

    def train(self) -> "CopyBatches":
        """Return an endless stream of batches that depends on the seed."""
        return CopyBatches(self, stream=(0, self.seed))

    def evaluation(self) -> "CopyBatches":
        """Return the evaluation batches, which do not depend on the seed."""
        return CopyBatches(self, stream=(1, 0), count=self.cfg.evaluation_batches)

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that the run lock records."""
        return {"task": "copy", "copied": self.cfg.copied}

    def batch(self, seed: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return this process's rows of the batch for a seed."""
        size = (self.cfg.batch_size, self.cfg.copied)
        tokens = np.random.default_rng(seed).integers(0, self.vocab_size, size, np.int32)[self.rows]
        row = np.tile(tokens, 2)
        weights = np.arange(1, row.shape[1], dtype=np.float32) >= self.cfg.copied
        return {
            "tokens": row[:, :-1],
            "targets": row[:, 1:],
            "weights": np.tile(weights, (len(row), 1)).astype("float32"),
        }


@attrs.define
class CopyBatches:
    """Iterator of `CopyTask`. Its state is the number of returned batches."""

    source: CopyTask
    stream: tuple[int, int]
    count: int | None = None
    index: int = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.index == self.count:
            raise StopIteration
        self.index += 1
        return self.source.batch((*self.stream, self.index))

    def get_state(self) -> int:
        """Return the number of returned batches."""
        return self.index

    def set_state(self, state: int) -> None:
        """Continue after this number of batches."""
        self.index = state

    def close(self) -> None:
        """Do nothing. The iterator has no workers."""
