"""The inputs of a step: one array of integers, so that one transfer brings them to the devices.

Legend: R rows of one token, K chunks of C tokens, L = R + K, T = R + K C, M blocks of a request.
"""

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_transformer.kernels.paged_attention import Split
from axlearn_plugins_transformer.paged_cache import PagedSlots

SAMPLED, MASKED = 1, 2
"""Flags of a row: its next token is chosen; the slot's mask holds for it."""
KIND, LOGPROBS, TARGETS = 0, 1, 2
"""Numbers before the rows: the kind of sampling, whether log-probabilities are wanted of choices, and of targets."""
HEADER = 4


@attrs.frozen
class StepBucket:
    """The shapes of a step.

    Attributes:
        rows: R.
        chunks: K.
        chunk: C.
        blocks: M.
    """

    rows: int
    chunks: int
    chunk: int
    blocks: int

    @property
    def results(self) -> int:
        """L."""
        return self.rows + self.chunks

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows + self.chunks * self.chunk

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The parts of the array of integers, in their order."""
        many = (self.results,)
        tail = (self.chunks, self.chunk)
        return {
            "header": (HEADER,), "slot": many, "flags": many, "start": many, "count": many,
            "tokens": (self.tokens,), "targets": tail, "table": (self.results, self.blocks),
        }  # fmt: skip

    @property
    def length(self) -> int:
        """Of the array of integers."""
        return sum(int(np.prod(shape)) for shape in self.sizes.values())

    def unpack(self, packed: jax.Array | np.ndarray) -> "Step":
        """The parts; of a NumPy array they are views."""
        parts, begin = {}, 0
        for name, shape in self.sizes.items():
            size = int(np.prod(shape))
            parts[name] = packed[begin : begin + size].reshape(shape)
            begin += size
        return Step(bucket=self, **parts)

    def empty(self, unused: int) -> "tuple[np.ndarray, Step]":
        """An array of a step without any tokens, and its parts; `unused` is the slot of rows that nobody has."""
        packed = np.zeros((self.length,), np.int32)
        step = self.unpack(packed)
        step.slot[:] = unused
        step.tokens[:] = 0
        return packed, step


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """The parts of a step, int32.

    Attributes:
        header: [HEADER].
        slot: [L].
        flags: [L].
        start: [L], the position of the first token.
        count: [L], how many tokens there are; 0 where nobody has the row.
        tokens: [T]; -1 takes the token that was chosen last for the slot.
        targets: [K, C].
        table: [L, M].
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

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """int32 [T] and whether each token is one of a request."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        at = jnp.arange(chunk, dtype=jnp.int32)[None]
        is_used = (at < self.count[rows:, None]).reshape(-1)
        later = jnp.where(at < self.count[rows:, None], self.start[rows:, None] + at, 0).reshape(-1)
        return jnp.concatenate([self.start[:rows], later]), jnp.concatenate([self.count[:rows] > 0, is_used])

    def owners(self) -> jax.Array:
        """int32 [T], the row of each token."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        later = rows + jnp.arange(self.bucket.chunks * chunk, dtype=jnp.int32) // max(chunk, 1)
        return jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), later])

    def slots(self, positions: jax.Array, real: jax.Array, blocks: int, size: int) -> PagedSlots:
        """Where the tokens go in a cache of so many blocks of `size` tokens."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        block = self.table[self.owners(), jnp.minimum(positions // size, self.bucket.blocks - 1)]
        write = jnp.where(real, block * size + positions % size, blocks * size)
        counts = jnp.where(jnp.arange(self.bucket.results) < rows, 1, chunk).astype(jnp.int32)
        return PagedSlots(
            table=self.table,
            lengths=jnp.where(self.count > 0, self.start + counts, counts),
            write=write,
            split=Split(rows, chunk),
        )

    def ends(self) -> jax.Array:
        """int32 [L], along T the last token of each row."""
        rows, chunk = self.bucket.rows, self.bucket.chunk
        first = rows + chunk * jnp.arange(self.bucket.chunks, dtype=jnp.int32)
        return jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), first + jnp.maximum(self.count[rows:] - 1, 0)])
