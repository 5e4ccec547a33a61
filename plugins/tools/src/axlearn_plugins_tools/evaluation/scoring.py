"""Log-likelihoods of tokens under a causal language model, computed in batches with few distinct shapes.

Legend: B rows, S tokens per row, C positions per chunk, D width, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import numpy as np

from axlearn_core.compose import Program
from axlearn_core.compose.model_program import with_program
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.causal_lm import LanguageModel
from axlearn_plugins_transformer.functions import ScoreBucket

SHORTEST = 32
"""Minimum padded length of a row. Longer rows are padded to a power of two, so that few shapes are compiled."""
CHUNK = 128
"""Positions per row whose logits are in memory at the same time."""


class Window(NamedTuple):
    """A row of inputs for the model.

    Attributes:
        inputs: Input tokens.
        targets: `targets[i]` follows `inputs[: i + 1]`.
        counted: Whether each target counts.
    """

    inputs: Sequence[int]
    targets: Sequence[int]
    counted: Sequence[bool]


@attrs.frozen
class Score:
    """Log-likelihood of a text's counted tokens.

    Attributes:
        log_likelihood: Sum of the natural logarithms of the tokens' probabilities.
        tokens: Number of tokens that count.
        greedy: Whether every token that counts is the most likely one at its position.
    """

    log_likelihood: float
    tokens: int
    greedy: bool


def windows(ids: Sequence[int], counted: Sequence[bool], *, length: int, stride: int | None = None) -> Iterator[Window]:
    """Split a text into rows of at most `length` tokens.

    Each token after the first is predicted once.

    Args:
        ids: Tokens of the text. The first is only used as context.
        counted: Whether each token counts.
        length: Length of the longest row.
        stride: Maximum number of new tokens per row. The other tokens of a row are context that overlaps the previous row. The
            default is `length`, which is the fastest. A smaller stride gives each token more context.
    """
    step = min(stride or length, length)
    for start in range(1, len(ids), step):
        stop = min(start + step, len(ids))
        first = max(1, stop - length)
        window_counted = [i >= start and bool(counted[i]) for i in range(first, stop)]
        if any(window_counted):
            yield Window(ids[first - 1 : stop - 1], ids[first:stop], window_counted)


class Scorer:
    """Scores texts with one model. Compiles once per shape.

    Args:
        model: A `CausalLM`. Its `decoder` returns hidden states, and its `logits` method computes the logits from them.
        length: Length of the longest row, in tokens.
        batch_tokens: Number of tokens per batch, including padding.
        program: Program of the model's experiment. By default, a new program for one device.
    """

    def __init__(self, model: Any, *, length: int, batch_tokens: int = 8192, program: Program | None = None):
        if not isinstance(model, LanguageModel):
            raise RequestError(f"a {type(model).__name__} cannot compute likelihoods: it has no decoder with logits")
        self.model, self.length, self.batch_tokens = model, length, batch_tokens
        self.program, self.weights = with_program(model, program)

    def __call__(
        self, texts: Sequence[tuple[Sequence[int], Sequence[bool]]], *, stride: int | None = None
    ) -> list[Score]:
        """Return the score of each text.

        Args:
            texts: Token ids of each text, and whether each token counts.
            stride: See `windows`.
        """
        all_windows = [(i, w) for i, (ids, counted) in enumerate(texts)
                for w in windows(ids, counted, length=self.length, stride=stride)]  # fmt: skip
        scores: list[list[tuple[float, bool]]] = [[] for _ in texts]
        # Start with the longest rows, so that any out-of-memory error occurs early.
        all_windows.sort(key=lambda x: -len(x[1].inputs))
        start = 0
        while start < len(all_windows):
            size = self._padded_length(len(all_windows[start][1].inputs))
            rows = max(1, self.batch_tokens // size)
            batch = [m for m in all_windows[start : start + rows] if self._padded_length(len(m[1].inputs)) == size]
            sums, greedy = self._run([w for _, w in batch], rows, size)
            for (owner, _), value, best in zip(batch, sums, greedy, strict=False):
                scores[owner].append((float(value), bool(best)))
            start += len(batch)
        counts = [sum(bool(c) for c in counted[1:]) for _, counted in texts]
        return [
            Score(math.fsum(v for v, _ in parts), n, all(g for _, g in parts))
            for parts, n in zip(scores, counts, strict=True)
        ]

    def continuations(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Return the score of each continuation after its context.

        If both are longer than a row, the context is truncated on the left.

        Raises:
            RequestError: If a context is empty, or a continuation is longer than a row.
        """
        texts = []
        for context, continuation in pairs:
            if not context or len(continuation) > self.length:
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens after {len(context)} cannot be scored\n"
                    f"    expected: a context of at least one token, and a continuation of at most {self.length} tokens"
                )
            row = [*context, *continuation][-self.length - 1 :]
            before = len(row) - len(continuation)
            texts.append((row, [i >= before for i in range(len(row))]))
        return self(texts)

    def _padded_length(self, size: int) -> int:
        return min(max(SHORTEST, 1 << (size - 1).bit_length()), max(self.length, 1))

    def _run(self, rows: Sequence[Window], count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = (np.zeros((count, size), np.int32) for _ in range(2))
        counted = np.zeros((count, size), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.inputs)] = row.inputs
            targets[i, : len(row.targets)] = row.targets
            counted[i, : len(row.counted)] = row.counted
        run = self.program.compile("score", ScoreBucket(count, size, min(CHUNK, size)))
        return jax.device_get(run(self.weights, tokens, targets, counted))
