"""Rows of requests into the arrays of steps, and results back to the rows."""

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_plugins_serving.contracts import Row, RowResult, Sampling, TokenLogprobs
from axlearn_plugins_serving.step_inputs import KIND, LOGPROBS, MASKED, SAMPLED, TARGETS, StepBucket
from axlearn_plugins_serving.token_sampling import DRAWN, FULL, GREEDY


@attrs.define
class Places:
    """Where the results of a row are.

    Attributes:
        chosen: (call, row of its results) of the chosen token; None where none is chosen.
        targets: (call, first of its target positions, how many) of each part of the row.
    """

    chosen: tuple[int, int] | None = None
    targets: list[tuple[int, int, int]] = attrs.Factory(list)


@attrs.frozen
class _Part:
    """Some tokens of a row that stand in one row of a step."""

    index: int
    start: int
    tokens: Sequence[int]
    last: bool


def kind_of(sampling: Sampling, masked: bool) -> int:
    """What choosing a token for a request needs: `GREEDY`, `DRAWN` or `FULL`."""
    if masked or sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty:
        return FULL
    return DRAWN if sampling.temperature > 0 else GREEDY


class Packer:
    """Lays rows out in the shapes that there are."""

    def __init__(self, buckets: Sequence[StepBucket], unused: int):
        """`unused` is the slot of rows that nobody has."""
        self.buckets, self.unused = buckets, unused
        self.chunk = buckets[0].chunk
        self.most_rows, self.most_chunks = max(b.rows for b in buckets), max(b.chunks for b in buckets)

    def pack(self, rows: Sequence[Row], options: Sequence[Sampling]) -> tuple[list[tuple[StepBucket, np.ndarray]], Any]:
        """The calls that compute the rows, in their order, and the `Places` of each row.

        Nearly always it is one call. Tokens of a prompt that have no room go into another one after it.
        """
        singles, chunks = self._parts(rows)
        places = [Places() for _ in rows]
        calls: list[tuple[StepBucket, np.ndarray]] = []
        while singles or chunks or not calls:
            ones, singles = singles[: self.most_rows], singles[self.most_rows :]
            some, chunks = chunks[: self.most_chunks], chunks[self.most_chunks :]
            bucket = self._bucket(len(ones), len(some))
            packed, step = bucket.empty(self.unused)
            for at, part in [*enumerate(ones), *enumerate(some, bucket.rows)]:
                self._put(step, at, part, rows[part.index], options[part.index])
                place = places[part.index]
                if part.last and rows[part.index].sample:
                    place.chosen = (len(calls), at)
                if rows[part.index].targets is not None:
                    place.targets.append((len(calls), (at - bucket.rows) * self.chunk, len(part.tokens)))
            calls.append((bucket, packed))
        return calls, places

    def _parts(self, rows: Sequence[Row]) -> tuple[list[_Part], list[_Part]]:
        singles, chunks = [], []
        for index, row in enumerate(rows):
            if len(row.tokens) <= 1 and row.targets is None:
                singles.append(_Part(index, row.start, row.tokens, True))
                continue
            for begin in range(0, len(row.tokens), self.chunk):
                tokens = row.tokens[begin : begin + self.chunk]
                chunks.append(_Part(index, row.start + begin, tokens, begin + self.chunk >= len(row.tokens)))
        return singles, chunks

    def _bucket(self, rows: int, chunks: int) -> StepBucket:
        fits = [b for b in self.buckets if b.rows >= rows and b.chunks >= chunks]
        return min(fits, key=lambda b: (b.tokens, b.results))

    def _put(self, step: Any, at: int, part: _Part, row: Row, sampling: Sampling) -> None:
        bucket = step.bucket
        step.slot[at], step.start[at], step.count[at] = row.slot, part.start, max(1, len(part.tokens))
        step.table[at, : len(row.blocks)] = row.blocks
        if at < bucket.rows:
            step.tokens[at] = part.tokens[0] if part.tokens else -1
        else:
            begin = bucket.rows + (at - bucket.rows) * bucket.chunk
            step.tokens[begin : begin + len(part.tokens)] = part.tokens
            if row.targets is not None:
                offset = part.start - row.start
                step.targets[at - bucket.rows, : len(part.tokens)] = row.targets[offset : offset + len(part.tokens)]
                step.header[TARGETS] = 1
        if part.last and row.sample:
            step.flags[at] = SAMPLED | (MASKED if row.mask is not None else 0)
            step.header[KIND] = max(step.header[KIND], kind_of(sampling, row.mask is not None))
            step.header[LOGPROBS] |= sampling.logprobs is not None


class StepResult:
    """What a step computes; see `contracts.Pending`."""

    def __init__(
        self, rows: Sequence[Row], options: Sequence[Sampling], places: Sequence[Places], results: Any, steps: int
    ):
        self._rows, self._options, self._places, self._steps = rows, options, places, steps
        self._results = results

    def wait(self) -> Sequence[RowResult]:
        """The results, one per row, in the order of the rows."""
        results = jax.device_get(self._results)
        return [self._result(results, *of) for of in zip(self._rows, self._options, self._places, strict=True)]

    def _result(self, results: Any, row: Row, sampling: Sampling, place: Places) -> RowResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None
        if place.chosen is not None:
            call, at = place.chosen
            sampled = results[call][0]
            if sampled.token.ndim == 1:
                sampled = jax.tree.map(lambda x: x[None], sampled)
            tokens = sampled.token[: self._steps, at].tolist()
            if sampling.logprobs is not None:
                logprobs = [_logprobs(sampled, (step, at), sampling.logprobs) for step in range(self._steps)]
        targets = None
        if row.targets is not None:
            targets = [
                _logprobs(results[call][1], (begin + i,), sampling.logprobs or 0)
                for call, begin, count in place.targets
                for i in range(count)
            ]
        return RowResult(tokens=tokens, logprobs=logprobs, target_logprobs=targets)


def _logprobs(sampled: Any, at: tuple[int, ...], top: int) -> TokenLogprobs:
    likeliest = zip(sampled.top_tokens[at][:top].tolist(), sampled.top_logprobs[at][:top].tolist(), strict=True)
    return TokenLogprobs(token=int(sampled.token[at]), logprob=float(sampled.logprob[at]), top=tuple(likeliest))
