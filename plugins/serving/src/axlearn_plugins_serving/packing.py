"""Pack rows into the arrays of steps, and unpack results."""

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_plugins_serving.contracts import Row, RowResult, Sampling, TokenLogprobs
from axlearn_plugins_serving.prompt_extras import ChunkEmbeddings, pack_embeddings
from axlearn_plugins_serving.step_inputs import (
    KIND,
    LOGPROBS,
    MASKED,
    SAMPLED,
    SAMPLING_LOGPROBS,
    TARGETS,
    VERIFIED,
    StepBucket,
)
from axlearn_plugins_serving.token_sampling import DRAWN, FULL, GREEDY, OWN_LOGPROB, TOP_LOGPROBS, ChosenTokens
from axlearn_plugins_transformer.recurrence import NOWHERE, PREVIOUS, ZERO

PackedCall = tuple[StepBucket, np.ndarray, ChunkEmbeddings | None]
"""Shapes, packed array and embeddings of a step."""


@attrs.define
class Places:
    """The positions of a row's results.

    Attributes:
        chosen: (call, result index) of the chosen token; None if no token is chosen.
        targets: (call, index of the first target, number of targets) for each part of the row.
    """

    chosen: tuple[int, int] | None = None
    targets: list[tuple[int, int, int]] = attrs.Factory(list)


@attrs.frozen
class _Part:
    """Tokens of a row that are computed together, in one row of a step."""

    index: int
    start: int
    tokens: Sequence[int]
    last: bool

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + max(1, len(self.tokens))


def sampling_kind(sampling: Sampling, masked: bool) -> int:
    """Return the kind of sampling that a request needs: `GREEDY`, `DRAWN` or `FULL`."""
    if masked or sampling.adjusts_logits:
        return FULL
    return GREEDY if sampling.is_greedy else DRAWN


class Packer:
    """Packs rows into the compiled step shapes."""

    def __init__(self, buckets: Sequence[StepBucket], unused: int, embedding: jax.ShapeDtypeStruct | None = None):
        """Build a packer.

        Args:
            buckets: Shapes of steps.
            unused: Slot of unassigned rows.
            embedding: Shape [D] and dtype of a token's embedding, for rows that contain embeddings.
        """
        self.buckets, self.unused, self.embedding = buckets, unused, embedding
        self.chunk = buckets[0].chunk
        self.max_rows, self.max_chunks = max(b.rows for b in buckets), max(b.chunks for b in buckets)

    def pack(self, rows: Sequence[Row], options: Sequence[Sampling]) -> tuple[list[PackedCall], list[Places]]:
        """Return the calls that compute the rows, in order, and the `Places` of each row.

        Usually there is one call. Prompt tokens that do not fit go into additional calls.
        """
        singles, chunks = self._split_rows(rows)
        places = [Places() for _ in rows]
        calls: list[PackedCall] = []
        while singles or chunks or not calls:
            step_rows, singles = singles[: self.max_rows], singles[self.max_rows :]
            step_chunks, chunks = chunks[: self.max_chunks], chunks[self.max_chunks :]
            bucket = self._find_bucket(len(step_rows), len(step_chunks))
            packed, step = bucket.empty(self.unused)
            if bucket.states:
                self._write_states(step, step_rows, rows)
                self._write_states(step, step_chunks, rows)
            for index, part in [*enumerate(step_rows), *enumerate(step_chunks, bucket.rows)]:
                self._write_part(step, index, part, rows[part.index], options[part.index])
                place = places[part.index]
                if part.last and rows[part.index].sample:
                    place.chosen = (len(calls), index)
                if rows[part.index].targets is not None:
                    place.targets.append((len(calls), (index - bucket.rows) * self.chunk, len(part.tokens)))
            calls.append((bucket, packed, self._pack_embeddings(bucket, step_chunks, rows)))
        return calls, places

    def _split_rows(self, rows: Sequence[Row]) -> tuple[list[_Part], list[_Part]]:
        singles, chunks = [], []
        for index, row in enumerate(rows):
            if row.is_single:
                singles.append(_Part(index, row.start, row.tokens, True))
                continue
            for begin in range(0, len(row.tokens), self.chunk):
                tokens = row.tokens[begin : begin + self.chunk]
                chunks.append(_Part(index, row.start + begin, tokens, begin + self.chunk >= len(row.tokens)))
        return singles, chunks

    def _pack_embeddings(
        self, bucket: StepBucket, chunks: Sequence[_Part], rows: Sequence[Row]
    ) -> ChunkEmbeddings | None:
        """Return the embeddings of the tokens in chunks, or None if no row contains any."""
        if self.embedding is None or all(rows[part.index].embeddings is None for part in chunks):
            return None
        count = bucket.chunks * bucket.chunk
        packed = ChunkEmbeddings(np.zeros((count, *self.embedding.shape), self.embedding.dtype), np.zeros(count, bool))
        for index, part in enumerate(chunks):
            row = rows[part.index]
            if row.embeddings is not None:
                offset = part.start - row.start
                pack_embeddings(packed, index * bucket.chunk, row.embeddings[offset : offset + len(part.tokens)])
        return packed

    def _find_bucket(self, rows: int, chunks: int) -> StepBucket:
        fits = [b for b in self.buckets if b.rows >= rows and b.chunks >= chunks]
        return min(fits, key=lambda b: (b.tokens, b.results))

    def _write_part(self, step: Any, index: int, part: _Part, row: Row, sampling: Sampling) -> None:
        bucket = step.bucket
        step.slot[index], step.start[index], step.count[index] = row.slot, part.start, max(1, len(part.tokens))
        step.table[index, : len(row.blocks)] = row.blocks
        if index < bucket.rows:
            step.tokens[index] = part.tokens[0] if part.tokens else -1
        else:
            begin = bucket.rows + (index - bucket.rows) * bucket.chunk
            step.tokens[begin : begin + len(part.tokens)] = part.tokens
            offset, count = part.start - row.start, len(part.tokens)
            if row.targets is not None:
                targets = row.targets[offset : offset + count]
                step.header[TARGETS] = 1
            else:  # heads that draft tokens read the prompt tokens that follow; nothing scores them
                targets = [*row.tokens[offset + 1 : offset + 1 + count], row.following or 0][:count]
            step.targets[index - bucket.rows, :count] = targets
        if part.last and row.sample:
            step.flags[index] = SAMPLED | (MASKED if row.mask is not None else 0) | (VERIFIED if row.verifies else 0)
            step.header[KIND] = max(step.header[KIND], sampling_kind(sampling, row.mask is not None))
            if sampling.logprobs is not None:
                step.header[LOGPROBS] = max(step.header[LOGPROBS], TOP_LOGPROBS if sampling.logprobs else OWN_LOGPROB)
            step.header[SAMPLING_LOGPROBS] |= sampling.sampling_logprobs

    @staticmethod
    def _write_states(step: Any, parts: Sequence[_Part], rows: Sequence[Row]) -> None:
        """Fill in the rows of the state pool that the parts of a call read, write and save.

        `parts` are the chunks of a call, or single tokens of different rows.
        """
        for index, part in enumerate(parts):
            row, singles = rows[part.index], step.bucket.rows
            continues = index > 0 and parts[index - 1].index == part.index
            continued = index + 1 < len(parts) and parts[index + 1].index == part.index
            if continues:
                read = PREVIOUS
            elif part.start > row.start or row.state is None:
                read = ZERO if part.start == 0 else row.slot
            else:
                read = row.state
            save = row.snapshots.get(part.end, NOWHERE)
            if row.is_single:  # the runner may choose several tokens, and saves the state at the end of a block
                save = next(iter(row.snapshots.values()), NOWHERE)
            # Only the last part of a row writes to its slot, because the order of writes to the same place is undefined.
            place = index if row.is_single else singles + index
            step.states[:, place] = read, NOWHERE if continued else row.slot, save


class PendingStep:
    """The pending results of a step; see `contracts.SubmittedStep`."""

    def __init__(
        self, rows: Sequence[Row], options: Sequence[Sampling], places: Sequence[Places], results: Any, steps: int
    ):
        self._rows, self._options, self._places, self._steps = rows, options, places, steps
        self._results = results

    def wait(self) -> Sequence[RowResult]:
        """Wait for the devices and return one result per row, in row order."""
        results = [(_with_steps(sampled), targets) for sampled, targets in jax.device_get(self._results)]
        return [self._row_result(results, *args) for args in zip(self._rows, self._options, self._places, strict=True)]

    def _row_result(self, results: Any, row: Row, sampling: Sampling, place: Places) -> RowResult:
        tokens: list[int] = []
        drafts: Sequence[int] = ()
        logprobs: list[TokenLogprobs] | None = None
        if place.chosen is not None:
            call, index = place.chosen
            sampled = results[call][0]
            tokens = sampled.token[: self._steps, index].tolist()
            drafts = () if sampled.drafts is None else sampled.drafts[0, index].tolist()
            if sampling.logprobs is not None:
                logprobs = [
                    _logprobs(sampled, (step, index), sampling.logprobs, sampling.sampling_logprobs)
                    for step in range(self._steps)
                ]
        targets = None
        if row.targets is not None:
            top = max(1, sampling.logprobs or 0) if row.verifies else sampling.num_prompt_logprobs
            targets = [
                _logprobs(results[call][1], (begin + i,), top)
                for call, begin, count in place.targets
                for i in range(count)
            ]
        return RowResult(tokens=tokens, logprobs=logprobs, target_logprobs=targets, drafts=drafts)


def _with_steps(sampled: ChosenTokens) -> ChosenTokens:
    """Return the choices of one or more steps as arrays [steps, L, ...]."""
    return sampled if sampled.token.ndim == 2 else jax.tree.map(lambda x: x[None], sampled)


def _logprobs(sampled: Any, index: tuple[int, ...], top: int, scored: bool = False) -> TokenLogprobs:
    likeliest: tuple[tuple[int, float], ...] = ()
    if top:
        values = sampled.top_tokens[index][:top].tolist(), sampled.top_logprobs[index][:top].tolist()
        likeliest = tuple(zip(*values, strict=True))
    return TokenLogprobs(
        token=int(sampled.token[index]),
        logprob=float(sampled.logprob[index]),
        top=likeliest,
        sampling_logprob=float(sampled.sampling_logprob[index]) if scored else None,
        kept=sampled.kept[index] if scored and sampled.kept is not None else None,
    )
