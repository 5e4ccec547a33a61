"""Log-likelihoods of tokens under a causal language model, in batches of few shapes.

Legend: B rows, S tokens of a row, C positions of a chunk, D width, V vocabulary.
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
"""Rows are padded to this length or the next power of two, so that few lengths are compiled."""
CHUNK = 128
"""Positions per row that have their logits in memory at one time."""


class Window(NamedTuple):
    """A row for the model: `targets[i]` follows `inputs[: i + 1]`, and counts where `counted[i]`."""

    inputs: Sequence[int]
    targets: Sequence[int]
    counted: Sequence[bool]


@attrs.frozen
class Score:
    """What counts of a text.

    Attributes:
        log_likelihood: the sum of the natural logarithms of its tokens' probabilities.
        tokens: how many.
        greedy: whether each of them is the likeliest one at its place.
    """

    log_likelihood: float
    tokens: int
    greedy: bool


def windows(ids: Sequence[int], counted: Sequence[bool], *, length: int, stride: int | None = None) -> Iterator[Window]:
    """A text of any length as rows of at most `length` tokens, each token after the first predicted once.

    Args:
        ids: the tokens; the first is context only.
        counted: for each of `ids`, whether it counts.
        length: of the longest row.
        stride: how many new tokens a row predicts at most, the rest being context that it shares with the row before it;
            by default `length`: as much as fits, which is the fastest. Smaller ones give more context to each token.
    """
    step = min(stride or length, length)
    for start in range(1, len(ids), step):
        stop = min(start + step, len(ids))
        first = max(1, stop - length)
        counts_here = [i >= start and bool(counted[i]) for i in range(first, stop)]
        if any(counts_here):
            yield Window(ids[first - 1 : stop - 1], ids[first:stop], counts_here)


class Scorer:
    """Scores texts with one model. Equal shapes compile once.

    Args:
        model: a `CausalLM`: its `decoder` gives hidden states, its `logits` the logits of some of them.
        length: of the longest row, in tokens.
        batch_tokens: how many tokens a batch has, padding included.
        program: of the experiment that the model belongs to; by default one of its own, for one device.
    """

    def __init__(self, model: Any, *, length: int, batch_tokens: int = 8192, program: Program | None = None):
        if not isinstance(model, LanguageModel):
            raise RequestError(f"a {type(model).__name__} gives no likelihoods: it has no decoder with logits")
        self.model, self.length, self.batch_tokens = model, length, batch_tokens
        self.program, self.weights = with_program(model, program)

    def __call__(
        self, texts: Sequence[tuple[Sequence[int], Sequence[bool]]], *, stride: int | None = None
    ) -> list[Score]:
        """The score of each text, given as (token ids, whether each counts); see `windows`."""
        all_windows = [(i, w) for i, (ids, counted) in enumerate(texts)
                for w in windows(ids, counted, length=self.length, stride=stride)]  # fmt: skip
        scores: list[list[tuple[float, bool]]] = [[] for _ in texts]
        # The longest first, so that what does not fit into memory fails at once.
        all_windows.sort(key=lambda x: -len(x[1].inputs))
        at = 0
        while at < len(all_windows):
            size = self._padded_length(len(all_windows[at][1].inputs))
            rows = max(1, self.batch_tokens // size)
            batch = [m for m in all_windows[at : at + rows] if self._padded_length(len(m[1].inputs)) == size]
            sums, greedy = self._run([w for _, w in batch], rows, size)
            for (owner, _), value, best in zip(batch, sums, greedy, strict=False):
                scores[owner].append((float(value), bool(best)))
            at += len(batch)
        counts = [sum(bool(c) for c in counted[1:]) for _, counted in texts]
        return [
            Score(math.fsum(v for v, _ in parts), n, all(g for _, g in parts))
            for parts, n in zip(scores, counts, strict=True)
        ]

    def continuations(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """The score of each continuation after its context, which is cut from the left where both are longer than a row.

        Raises:
            RequestError: a context is empty, or a continuation longer than a row.
        """
        texts = []
        for context, continuation in pairs:
            if not context or len(continuation) > self.length:
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens after {len(context)} cannot be scored\n"
                    f"    expected: at least one token before it, and at most {self.length} tokens in it"
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
