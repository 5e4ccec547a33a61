"""Layers with a recurrent state: how their tokens form sequences in training, generation and serving.

A recurrent layer computes `(x, sequences, state) -> (y, new state)` for sequences of tokens. `run_recurrent` calls this function
with the sequences that the context describes: the rows of a batch, the next tokens of cached rows, or the tokens of a serving step.

Legend: B sequences, S tokens, D width, C tokens of a chunk, K chunks, R single tokens, L = R + K.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context

ZERO, PREVIOUS = -1, -2
"""Values of `StateRows.read`: the zero state, and the state after the previous chunk of the same step."""
NOWHERE = 2**30
"""Value of `StateRows.write` and `StateRows.save` that discards the state."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRows:
    """Rows of a pool of states that the parts of a serving step read and write.

    A step has R single tokens, followed by K chunks of C tokens.

    Attributes:
        read: Row with the state before the part, or `ZERO`, or `PREVIOUS`, int32 [L].
        write: Row for the state after the part, or `NOWHERE`, int32 [L].
        save: Second row for the state after the part, or `NOWHERE`, int32 [L].
        counts: Number of tokens in the part; the others are padding, int32 [L].
        singles: R.
        chunk: C.
    """

    read: jax.Array
    write: jax.Array
    save: jax.Array
    counts: jax.Array
    singles: int = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})


@runtime_checkable
class HasStateRows(Protocol):
    """Slots of a serving step.

    Attributes:
        states: Rows of recurrent states.
    """

    states: StateRows | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reload:
    """States with which the chunks of a sequence begin.

    Attributes:
        restarts: Whether a chunk begins with its state in `states` instead of the state after the previous chunk, bool [B, K].
        states: Pytree of arrays [B, K, ...].
        chunk: C; the sequence has K C tokens.
    """

    restarts: jax.Array
    states: Any
    chunk: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """B sequences of S tokens.

    Attributes:
        segment_ids: int32 [B, S], equal within a document. The state is reset at the beginning of each document. None means one
            document per sequence.
        real: bool [B, S], False for padding, which does not change the state. None if there is no padding.
        reload: States with which chunks begin, or None. If it is given, the layer returns the states after all chunks [B, K, ...]
            instead of the final states [B, ...].
    """

    segment_ids: jax.Array | None = None
    real: jax.Array | None = None
    reload: Reload | None = None

    def documents(self) -> jax.Array | None:
        """Return the number of document boundaries up to each token, int32 [B, S], or None if there is one document."""
        if self.segment_ids is None:
            return None
        changes = jnp.concatenate(
            [jnp.zeros_like(self.segment_ids[:, :1]), (jnp.diff(self.segment_ids, axis=1) != 0).astype(jnp.int32)],
            axis=1,
        )
        return jnp.cumsum(changes, axis=1)

    def clear_padding(self, x: jax.Array, value: float = 0.0) -> jax.Array:
        """Set [B, S, ...] to a value at padding."""
        if self.real is None:
            return x
        return jnp.where(self.real.reshape(*self.real.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(value, x.dtype))


class Recurrence(Protocol):
    """The computation of a recurrent layer."""

    def __call__(self, x: jax.Array, sequences: Sequences, state: Any) -> tuple[jax.Array, Any]:
        """Process the tokens of sequences.

        Args:
            x: [B, S, D].
            sequences: Facts about the sequences.
            state: State before the first token, a pytree of arrays [B, ...]. None is the zero state.

        Returns:
            [B, S, D], and the state after the last token, or the states after all chunks; see `Sequences`. If `state` and
            `sequences.reload` are None, the state is not used.
        """
        ...


def run_recurrent(run: Recurrence, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
    """Apply a recurrent layer to the tokens of a context.

    Args:
        run: Computation of the layer.
        x: [B, S, D]; in a serving step [T, 1, D].
        context: Context of the tokens.
        cache: States, a pytree of arrays [B, ...]; in a serving step [rows of the pool, ...]; in training None.

    Returns:
        [B, S, D] and the new states.

    Raises:
        RequestError: If cached rows contain several documents, or if a prefix of the rows attends in both directions.
    """
    if context.prefix is not None:
        raise RequestError(
            "a recurrent layer reads tokens in order, so no prefix can attend in both directions\n"
            "    got: a batch with `prefix`\n    fix: train without prefixes, or without recurrent layers"
        )
    if cache is None:
        y, _ = run(x, Sequences(segment_ids=context.segment_ids, real=context.real), None)
        return y, None
    if context.segment_ids is not None:
        raise RequestError("a recurrent layer with a cache requires one document per row: leave out segment_ids")
    slots: Any = context.slots
    if isinstance(slots, HasStateRows) and slots.states is not None:
        return _run_step(run, x, slots.states, cache)
    return run(x, Sequences(real=context.real), cache)


def _run_step(run: Recurrence, x: jax.Array, rows: StateRows, cache: Any) -> tuple[jax.Array, Any]:
    """Run the parts of a serving step. All parts read the old states, except for chunks that follow one another."""
    singles, outputs, states = rows.singles, [], []
    initial = jax.tree.map(lambda pool: _read(pool, rows.read), cache)
    if singles:
        real = (rows.counts[:singles] > 0)[:, None]
        y, new = run(x[:singles], Sequences(real=real), jax.tree.map(lambda s: s[:singles], initial))
        outputs.append(y)
        states.append(new)
    chunks = rows.read.shape[0] - singles
    if chunks:
        used = jnp.arange(rows.chunk, dtype=jnp.int32)[None] < rows.counts[singles:, None]
        reload = Reload(
            restarts=(rows.read[singles:] != PREVIOUS)[None],
            states=jax.tree.map(lambda s: s[None, singles:], initial),
            chunk=rows.chunk,
        )
        y, new = run(x[singles:].reshape(1, -1, x.shape[-1]), Sequences(real=used.reshape(1, -1), reload=reload), None)
        outputs.append(y.reshape(-1, 1, y.shape[-1]))
        states.append(jax.tree.map(lambda s: s[0], new))
    after = jax.tree.map(lambda *parts: jnp.concatenate(parts), *states)
    _check_states(cache, after)
    cache = jax.tree.map(
        lambda pool, s: (
            pool.at[rows.write]
            .set(s.astype(pool.dtype), mode="drop")
            .at[rows.save]
            .set(s.astype(pool.dtype), mode="drop")
        ),
        cache,
        after,
    )
    return jnp.concatenate(outputs), cache


def _check_states(pool: Any, states: Any) -> None:
    """Raise `RequestError` if the states of a layer do not fit its rows in the pool."""
    expected, actual = (jax.tree.map(lambda x: list(x.shape[1:]), tree) for tree in (pool, states))
    if expected != actual:
        raise RequestError(
            f"a recurrent layer returned states of other shapes than it declares\n    got: {actual}\n"
            f"    expected: {expected}, as `cache_spec` declares\n    fix: correct the function that the layer passes to "
            "`run_recurrent`, or its `cache_spec`"
        )


def _read(pool: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows from a pool, with zeros for `ZERO` and `PREVIOUS`."""
    values = pool.at[jnp.maximum(rows, 0)].get(mode="clip")
    return jnp.where(rows.reshape(-1, *(1,) * (pool.ndim - 1)) >= 0, values, jnp.zeros((), pool.dtype))
