"""Log-likelihoods of tokens under a causal language model, in batches of few shapes.

Legend: B rows, S tokens of a row, C positions of a chunk, D width, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from axlearn_core.errors import RequestError
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import Context

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
        mine = [i >= start and bool(counted[i]) for i in range(first, stop)]
        if any(mine):
            yield Window(ids[first - 1 : stop - 1], ids[first:stop], mine)


class Scorer:
    """Scores texts with one model. Equal shapes compile once.

    Args:
        model: a `CausalLM`: its `decoder` gives hidden states, its `logits` the logits of some of them.
        length: of the longest row, in tokens.
        batch_tokens: how many tokens a batch has, padding included.
        kernels: the selection of kernels to trace under; None takes the references.
    """

    def __init__(self, model: Any, *, length: int, batch_tokens: int = 8192, kernels: Any = None):
        if not (hasattr(model, "decoder") and hasattr(model, "logits")):
            raise RequestError(f"a {type(model).__name__} gives no likelihoods: it has no decoder with logits")
        self.model, self.length, self.batch_tokens, self.kernels = model, length, batch_tokens, kernels
        self.graph, self.state = nnx.split(model)

    def __call__(
        self, texts: Sequence[tuple[Sequence[int], Sequence[bool]]], *, stride: int | None = None
    ) -> list[Score]:
        """The score of each text, given as (token ids, whether each counts); see `windows`."""
        made = [(i, w) for i, (ids, counted) in enumerate(texts)
                for w in windows(ids, counted, length=self.length, stride=stride)]  # fmt: skip
        found: list[list[tuple[float, bool]]] = [[] for _ in texts]
        # The longest first, so that what does not fit into memory fails at once.
        made.sort(key=lambda x: -len(x[1].inputs))
        at = 0
        while at < len(made):
            size = self._padded(len(made[at][1].inputs))
            rows = max(1, self.batch_tokens // size)
            batch = [m for m in made[at : at + rows] if self._padded(len(m[1].inputs)) == size]
            sums, greedy = self._run([w for _, w in batch], rows, size)
            for (owner, _), value, best in zip(batch, sums, greedy, strict=False):
                found[owner].append((float(value), bool(best)))
            at += len(batch)
        counts = [sum(bool(c) for c in counted[1:]) for _, counted in texts]
        return [
            Score(math.fsum(v for v, _ in parts), n, all(g for _, g in parts))
            for parts, n in zip(found, counts, strict=True)
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
            kept = [*context, *continuation][-self.length - 1 :]
            before = len(kept) - len(continuation)
            texts.append((kept, [i >= before for i in range(len(kept))]))
        return self(texts)

    def _padded(self, size: int) -> int:
        return min(max(SHORTEST, 1 << (size - 1).bit_length()), max(self.length, 1))

    def _run(self, rows: Sequence[Window], count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = (np.zeros((count, size), np.int32) for _ in range(2))
        counted = np.zeros((count, size), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.inputs)] = row.inputs
            targets[i, : len(row.targets)] = row.targets
            counted[i, : len(row.counted)] = row.counted
        with selection.use(self.kernels) if self.kernels is not None else contextlib.nullcontext():
            made = _scores(self.state, tokens, targets, counted, graph=self.graph, chunk=min(CHUNK, size))
        return jax.device_get(made)


@functools.partial(jax.jit, static_argnames=("graph", "chunk"))
def _scores(
    state: Any, tokens: jax.Array, targets: jax.Array, counted: jax.Array, *, graph: Any, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """int32, int32, bool [B, S] -> (float32 [B] log-likelihoods, bool [B] whether all are the likeliest)."""
    model = nnx.merge(graph, state)
    hidden, _ = model.decoder(tokens, Context())
    count = -(-tokens.shape[1] // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[B, S, ...] -> [chunks, B, C, ...], padded with what does not count."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def part(x: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own, wanted, counts = x
        logits = model.logits(own).astype(jnp.float32)
        at = jnp.take_along_axis(logits, wanted[..., None], axis=-1, mode="clip")[..., 0]
        values = jnp.where(counts, at - jax.nn.logsumexp(logits, axis=-1), 0.0)
        return jnp.sum(values, axis=1), jnp.all((jnp.argmax(logits, axis=-1) == wanted) | ~counts, axis=1)

    sums, greedy = lax.map(part, (split(hidden), split(targets), split(counted)))
    return jnp.sum(sums, axis=0), jnp.all(greedy, axis=0)
