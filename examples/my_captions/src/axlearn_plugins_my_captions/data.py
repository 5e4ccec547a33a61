"""The `drawn-squares` component."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.extend import ConfigError, Configurable, Node, Problem, Tokenizer, node, setting
from axlearn_plugins_my_captions.model import IMAGE
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

SIZE = 8
"""Pixels per side of an image."""
LENGTH = 16
"""Tokens per row: the image, its caption, and the end."""


def draw(row: int, column: int, rng: np.random.Generator) -> np.ndarray:
    """Return an image of noise with a bright pixel, float32 [64]."""
    image = rng.normal(0.0, 0.1, (SIZE, SIZE)).astype(np.float32)
    image[row, column] += 3.0
    return image.reshape(-1)


class DrawnSquares(Configurable):
    """Images with a bright pixel, and captions such as "row 3 column 5"."""

    @node
    class Config(Configurable.Config["DrawnSquares"]):
        """Settings for `DrawnSquares`.

        Attributes:
            batch_size: Rows per global batch.
            evaluation_batches: Number of batches per evaluation.
            tokenizer: Tokenizer of the captions.
        """

        batch_size: int = setting(default=64, ge=1)
        evaluation_batches: int = setting(default=2, ge=1)
        tokenizer: Node[Tokenizer] = ByteTokenizer.Config()

        def batch_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
            """Return the shape and dtype of each array of the global batch."""
            shape = (self.batch_size, LENGTH)
            images = ((self.batch_size, SIZE * SIZE), "float32")
            return {
                "tokens": (shape, "int32"),
                "targets": (shape, "int32"),
                "weights": (shape, "float32"),
                "images": images,
            }

    def __init__(self, cfg: Config, *, seed: int, process_index: int, process_count: int):
        if cfg.batch_size % process_count:
            expected = f"a multiple of {process_count}"
            got, message = f"{cfg.batch_size} rows", "is not divisible by the number of processes"
            raise ConfigError(Problem(path="input.batch_size", message=message, got=got, expected=expected))
        self.cfg, self.seed, self.tokenizer = cfg, seed, cfg.tokenizer.build()
        self.rows = np.split(np.arange(cfg.batch_size), process_count)[process_index]

    def train(self) -> "Batches":
        """Return an endless stream of batches that depends on the seed."""
        return Batches(self, stream=(0, self.seed))

    def evaluation(self) -> "Batches":
        """Return the evaluation batches, which do not depend on the seed."""
        return Batches(self, stream=(1, 0), count=self.cfg.evaluation_batches)

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that the run lock records."""
        return {"task": "drawn squares", "size": SIZE}

    def batch(self, seed: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return this process's rows of the batch for a seed. The loss counts the caption and the end."""
        rng = np.random.default_rng(seed)
        places = rng.integers(0, SIZE, (self.cfg.batch_size, 2))
        images = np.stack([draw(row, column, rng) for row, column in places])
        texts = [self.tokenizer.encode(f"row {row} column {column}") for row, column in places]
        tokens = np.asarray([[IMAGE, *text, self.tokenizer.eos_id][:LENGTH] for text in texts], np.int32)[self.rows]
        targets = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), self.tokenizer.eos_id, np.int32)], 1)
        weights = np.ones(tokens.shape, np.float32)
        return {"tokens": tokens, "targets": targets, "weights": weights, "images": images[self.rows]}


@attrs.define
class Batches:
    """Iterator of `DrawnSquares`. Its state is the number of returned batches."""

    source: DrawnSquares
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
