"""The inputs of a step, packed into one integer array.

A single transfer moves them to the devices.

Legend: R rows of one token, K chunks of C tokens, L = R + K, T = R + K C, M blocks of a request.
"""

import math

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_transformer.kernels.paged_attention import Split
from axlearn_plugins_transformer.paged_cache import PagedSlots
from axlearn_plugins_transformer.recurrence import NOWHERE, ZERO, StateRows

SAMPLED, MASKED, VERIFIED = 1, 2, 4
"""Flags of a row: choose its next token; apply the slot's mask; verify drafted tokens."""
KIND, LOGPROBS, TARGETS, SAMPLING_LOGPROBS = 0, 1, 2, 3
"""Header indices: the kind of sampling, and whether to report log-probabilities of chosen tokens, of targets, and of chosen tokens
in the distribution that they were drawn from."""
HEADER = 4
NO_STATE = ZERO, NOWHERE, NOWHERE
"""`Step.states` of a row that is not assigned: the rows to read, write and save."""


@attrs.frozen
class StepBucket:
    """The shapes of a step.

    Attributes:
        rows: R.
        chunks: K.
        chunk: C.
        blocks: M.
        states: Whether the model has recurrent states.
    """

    rows: int
    chunks: int
    chunk: int
    blocks: int
    states: bool = False

    @property
    def results(self) -> int:
        """The number of results, L."""
        return self.rows + self.chunks

    @property
    def tokens(self) -> int:
        """The number of tokens, T."""
        return self.rows + self.chunks * self.chunk

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The parts of the packed array, in order."""
        per_result = (self.results,)
        per_chunk = (self.chunks, self.chunk)
        return {
            "header": (HEADER,), "slot": per_result, "flags": per_result, "start": per_result, "count": per_result,
            "tokens": (self.tokens,), "targets": per_chunk, "table": (self.results, self.blocks),
            "states": (len(NO_STATE), self.results if self.states else 0),
        }  # fmt: skip

    @property
    def length(self) -> int:
        """The length of the packed array."""
        return sum(math.prod(shape) for shape in self.sizes.values())

    def unpack(self, packed: jax.Array | np.ndarray) -> "Step":
        """Split the packed array into its parts. The parts of a NumPy array are views."""
        parts, begin = {}, 0
        for name, shape in self.sizes.items():
            size = math.prod(shape)
            parts[name] = packed[begin : begin + size].reshape(shape)
            begin += size
        return Step(bucket=self, **parts)

    def empty(self, unused: int) -> "tuple[np.ndarray, Step]":
        """Return the packed array of a step without tokens, and its parts.

        Unassigned rows get the slot `unused`.
        """
        packed = np.zeros((self.length,), np.int32)
        step = self.unpack(packed)
        step.slot[:] = unused
        step.tokens[:] = 0
        step.states[:] = np.asarray(NO_STATE, np.int32)[:, None]
        return packed, step


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """The parts of a step's packed array, int32.

    Attributes:
        header: [HEADER]; see `KIND` and the indices after it.
        slot: [L], slot of each row.
        flags: [L], see `SAMPLED`, `MASKED` and `VERIFIED`.
        start: [L], position of the first token.
        count: [L], number of tokens; 0 for unassigned rows.
        tokens: [T]; -1 stands for the last token chosen for the slot.
        targets: [K, C].
        table: [L, M], blocks of each row.
        states: [3, L], rows of the pool of states to read, write and save; see `StateRows`. [3, 0] for a model without states.
    """

    bucket: StepBucket
    header: jax.Array
    slot: jax.Array
    flags: jax.Array
    start: jax.Array
    count: jax.Array
    tokens: jax.Array
    targets: jax.Array
    table: jax.Array
    states: jax.Array

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Return the position, int32 [T], and the validity, bool [T], of each token.

        Tokens that belong to no request are not valid.
        """
        rows, chunk = self.bucket.rows, self.bucket.chunk
        offsets = jnp.arange(chunk, dtype=jnp.int32)[None]
        is_used = (offsets < self.count[rows:, None]).reshape(-1)
        chunk_positions = jnp.where(offsets < self.count[rows:, None], self.start[rows:, None] + offsets, 0).reshape(-1)
        return jnp.concatenate([self.start[:rows], chunk_positions]), jnp.concatenate([self.count[:rows] > 0, is_used])

    def row_indices(self) -> jax.Array:
        """Return the row of each token, int32 [T]."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        chunk_rows = rows + jnp.arange(self.bucket.chunks * chunk, dtype=jnp.int32) // max(chunk, 1)
        return jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), chunk_rows])

    def slots(self, positions: jax.Array, real: jax.Array, blocks: int, size: int) -> PagedSlots:
        """Return the cache slots of the tokens.

        The cache has `blocks` blocks of `size` tokens.
        """
        rows, chunk = self.bucket.rows, self.bucket.chunk
        block = self.table[self.row_indices(), jnp.minimum(positions // size, self.bucket.blocks - 1)]
        write = jnp.where(real, block * size + positions % size, blocks * size)
        counts = jnp.where(jnp.arange(self.bucket.results) < rows, 1, chunk).astype(jnp.int32)
        return PagedSlots(
            table=self.table,
            lengths=jnp.where(self.count > 0, self.start + counts, counts),
            write=write,
            split=Split(rows, chunk),
            pages=blocks,
            page_size=size,
            states=self._state_rows() if self.bucket.states else None,
        )

    def _state_rows(self) -> StateRows:
        read, write, save = self.states
        return StateRows(
            read=read, write=write, save=save, counts=self.count, singles=self.bucket.rows, chunk=self.bucket.chunk
        )

    def substep(self, index: jax.Array, block_size: int) -> "Step":
        """Return the step in which each single-token row decodes the token `index` places after its next one.

        States are read where the previous token wrote them, and saved only at the end of a block.
        """
        tokens, start = jnp.where(index > 0, -1, self.tokens), self.start + index
        read, write, save = self.states
        ends = (start[: read.shape[0]] + 1) % block_size == 0
        states = jnp.stack([jnp.where(index > 0, write, read), write, jnp.where(ends, save, NOWHERE)])
        return attrs.evolve(self, start=start, tokens=tokens, states=states)

    def last_indices(self) -> jax.Array:
        """Return the index of each row's last token along T, int32 [L]."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        first = rows + chunk * jnp.arange(self.bucket.chunks, dtype=jnp.int32)
        return jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), first + jnp.maximum(self.count[rows:] - 1, 0)])
