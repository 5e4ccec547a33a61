"""The component `copy-task`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import ConfigError, Problem


class CopyTask(Configurable):
    """Rows of random tokens followed by the same tokens; the loss counts the copy alone."""

    @node
    class Config(Configurable.Config["CopyTask"]):
        """`copied` tokens are repeated in each row; an evaluation has `evaluation_batches`."""

        batch_size: int = setting(default=8, ge=1)
        copied: int = setting(default=8, ge=1)
        evaluation_batches: int = setting(default=2, ge=1)

        def batch_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
            """Name -> (shape, dtype) of the global batch."""
            shape = (self.batch_size, 2 * self.copied - 1)
            return {"tokens": (shape, "int32"), "targets": (shape, "int32"), "weights": (shape, "float32")}

    def __init__(self, cfg: Config, *, seed: int, process_index: int, process_count: int, vocab_size: int):
        if cfg.batch_size % process_count:
            problem = Problem(
                path="input.batch_size",
                message="the processes do not divide it",
                got=f"{cfg.batch_size} rows for {process_count} processes",
                expected=f"a multiple of {process_count}",
            )
            raise ConfigError(problem)
        rows = cfg.batch_size // process_count
        self.cfg, self.seed, self.vocab_size = cfg, seed, vocab_size
        self.rows = slice(process_index * rows, (process_index + 1) * rows)

    def train(self) -> "CopyBatches":
        """Endless batches, a function of the seed and their number."""
        return CopyBatches(self, stream=(0, self.seed), count=None)

    def evaluation(self) -> "CopyBatches":
        """The same batches for every seed."""
        return CopyBatches(self, stream=(1, 0), count=self.cfg.evaluation_batches)

    def describe(self) -> Mapping[str, Any]:
        """What the run lock keeps."""
        return {"task": "copy", "copied": self.cfg.copied}


class CopyBatches:
    """The iterator of `CopyTask`; its state is the number of batches returned."""

    def __init__(self, source: CopyTask, stream: tuple[int, int], count: int | None):
        self.source, self.stream, self.count, self.index = source, stream, count, 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.index == self.count:
            raise StopIteration
        rng, cfg = np.random.default_rng((*self.stream, self.index)), self.source.cfg
        self.index += 1
        tokens = rng.integers(0, self.source.vocab_size, (cfg.batch_size, cfg.copied), np.int32)[self.source.rows]
        row = np.concatenate([tokens, tokens], axis=1)
        weights = np.zeros((len(row), row.shape[1] - 1), np.float32)
        weights[:, cfg.copied - 1 :] = 1
        return {"tokens": row[:, :-1], "targets": row[:, 1:], "weights": weights}

    def get_state(self) -> int:
        """How many batches were returned."""
        return self.index

    def set_state(self, state: int) -> None:
        """Continues after that many batches."""
        self.index = state

    def close(self) -> None:
        """Ends nothing: there are no workers."""
