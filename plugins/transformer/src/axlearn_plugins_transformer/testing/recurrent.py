"""The conformance suite for recurrent layers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.nn.layer import Context, Precision
from axlearn_plugins_transformer.cache_spec import empty_cache, spec_of
from axlearn_plugins_transformer.recurrence import NOWHERE, PREVIOUS, ZERO, StateRows
from axlearn_testing.common import assert_close, compile_fast

B, S, D, C = 2, 12, 32, 4
"""Rows, tokens per row, width, tokens of a chunk in a serving step."""
ROWS, SAVED = 2, 2
"""States of running requests in a pool, and the row after them for a saved state."""
NOISE = 0.1
"""Standard deviation of a change to each parameter, because initial zeros would hide errors."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateSlots:
    """Slots of a serving step with nothing but the rows of states."""

    states: StateRows


@attrs.frozen(kw_only=True)
class StepPart:
    """Tokens of a request in a serving step.

    Attributes:
        row: Row of the inputs with the request's tokens.
        begin: First token.
        end: Token after the last one.
        read: Row of the pool with the state before the first token, `ZERO`, or `PREVIOUS`.
        write: Row for the state after the last token.
        save: Second row for this state.
    """

    row: int
    begin: int
    end: int
    read: int
    write: int
    save: int = NOWHERE


class RecurrentSuite:
    """Tests that a recurrent layer computes the same in training, generation and serving.

    Attributes:
        config: Config of the layer, with all required fields set. All entries of its cache must belong to requests.
        offered: Keyword arguments that the parent offers to `build`, in addition to `rngs` and `precision`.
        tolerance: Relative tolerance for float32 results, in the norm of each array.
    """

    config: Node[Any]
    offered: Mapping[str, Any] = {"input_dim": D}
    tolerance: float = 2e-5

    def inputs(self) -> np.ndarray:
        """Return [B, S, D]."""
        return np.random.default_rng(1).standard_normal((B, S, D), np.float32)

    def spec(self) -> Any:
        """Return the entries of the layer's cache."""
        return spec_of(_build(type(self)))

    def run(self, x: Any, context: Context, cache: Any = None) -> tuple[np.ndarray, Any]:
        """Call the layer, and return its output and its new cache."""
        y, cache = _compile_call(type(self))(x, context, cache)
        return np.asarray(y), cache

    def expect(self) -> np.ndarray:
        """Return the outputs of all tokens at once, without a cache."""
        return self.run(self.inputs(), Context())[0]

    def run_step(
        self, pool: Any, singles: Sequence[StepPart] = (), chunks: Sequence[StepPart] = ()
    ) -> tuple[list[np.ndarray], Any]:
        """Run a serving step, and return the output of each part and the new pool. Padding has random values."""
        parts, inputs = [*singles, *chunks], self.inputs()
        x = 10 * np.random.default_rng(2).standard_normal((len(singles) + C * len(chunks), 1, D), np.float32)
        positions = np.zeros((len(x), 1), np.int32)
        starts = [*range(len(singles)), *(len(singles) + C * i for i in range(len(chunks)))]
        for part, start in zip(parts, starts, strict=True):
            tokens = np.arange(part.begin, part.end)
            x[start : start + len(tokens), 0] = inputs[part.row, tokens]
            positions[start : start + len(tokens), 0] = tokens
        columns = {
            name: jnp.asarray([getattr(p, name) for p in parts], jnp.int32) for name in ("read", "write", "save")
        }
        counts = jnp.asarray([p.end - p.begin for p in parts], jnp.int32)
        states = StateRows(**columns, counts=counts, singles=len(singles), chunk=C)
        y, pool = self.run(x, _make_context(positions=positions, slots=StateSlots(states)), pool)
        return [y[start : start + part.end - part.begin, 0] for part, start in zip(parts, starts, strict=True)], pool

    def used_pool(self) -> Any:
        """Return a pool of states that earlier requests have left behind."""
        rng, empty = np.random.default_rng(3), empty_cache(self.spec(), ROWS + 1, 1)
        return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)

    def assert_equals(self, actual: Sequence[np.ndarray], row: int, begin: int, message: str) -> None:
        """Assert that outputs equal those of a row from a token on."""
        joined = np.concatenate(actual)
        assert_close(joined, self.expect()[row, begin : begin + len(joined)], self.tolerance, message)

    def test_entries_belong_to_requests(self) -> None:
        entries = jax.tree.leaves(self.spec())
        assert entries, "the layer declares no state in `cache_spec`"
        assert {entry.per for entry in entries} == {"request"}, "an entry of `cache_spec` is not kept per request"

    def test_the_cache_keeps_its_shape(self) -> None:
        cache = empty_cache(self.spec(), B, S)
        _, new = self.run(self.inputs(), Context(), cache)
        like = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (cache, new)]
        assert like[0] == like[1], "a call must return the arrays that `cache_spec` declares"

    @pytest.mark.parametrize("chunks", [(1,) * S, (S,), (5, 1, 6)], ids=["tokens", "one", "odd"])
    def test_chunks_are_the_whole(self, chunks: tuple[int, ...]) -> None:
        x, cache, parts, begin = self.inputs(), empty_cache(self.spec(), B, S), [], 0
        for size in chunks:
            positions = np.arange(begin, begin + size, dtype=np.int32)[None]
            y, cache = self.run(x[:, begin : begin + size], _make_context(positions=positions), cache)
            parts.append(y)
            begin += size
        assert_close(np.concatenate(parts, axis=1), self.expect(), self.tolerance, f"chunks of {chunks}")

    def test_documents_begin_with_the_empty_state(self) -> None:
        x, cut = self.inputs(), 5
        index = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
        ids, positions = (index >= cut).astype(np.int32) + 1, np.where(index < cut, index, index - cut)
        packed, _ = self.run(x, _make_context(segment_ids=ids, positions=positions))
        for document in (slice(0, cut), slice(cut, S)):
            alone, _ = self.run(x[:, document], Context())
            assert_close(packed[:, document], alone, self.tolerance, f"tokens {document.start} to {document.stop - 1}")

    def test_padding_leaves_the_state_unchanged(self) -> None:
        x, size = self.inputs(), 7
        real = np.broadcast_to(np.arange(S) < size, (B, S))
        padded, cache = self.run(
            np.where(real[..., None], x, 9.0), _make_context(real=real), empty_cache(self.spec(), B, S)
        )
        positions = np.arange(size, S, dtype=np.int32)[None]
        rest, _ = self.run(x[:, size:], _make_context(positions=positions), cache)
        together = np.concatenate([padded[:, :size], rest], axis=1)
        assert_close(together, self.expect(), self.tolerance, "tokens after a padded prompt")

    def test_steps_of_a_server_are_the_whole(self) -> None:
        first = [
            StepPart(row=0, begin=0, end=4, read=ZERO, write=NOWHERE),
            StepPart(row=0, begin=4, end=8, read=PREVIOUS, write=0),
            StepPart(row=1, begin=0, end=3, read=ZERO, write=1),
        ]
        (*long, short), pool = self.run_step(self.used_pool(), chunks=first)
        (single, chunk), pool = self.run_step(
            pool,
            singles=[StepPart(row=0, begin=8, end=9, read=0, write=0)],
            chunks=[StepPart(row=1, begin=3, end=7, read=1, write=1)],
        )
        (one, other), _ = self.run_step(
            pool, singles=[StepPart(row=r, begin=t, end=t + 1, read=r, write=r) for r, t in ((0, 9), (1, 7))]
        )
        self.assert_equals([*long, single, one], 0, 0, "a prompt of two chunks, and two tokens")
        self.assert_equals([short, chunk, other], 1, 0, "a prompt in two steps, and a token")

    def test_preempted_requests_resume_from_saved_states(self) -> None:
        prompt = StepPart(row=0, begin=0, end=4, read=ZERO, write=0, save=SAVED)
        _, pool = self.run_step(self.used_pool(), chunks=[prompt])
        _, pool = self.run_step(pool, chunks=[StepPart(row=0, begin=4, end=8, read=0, write=0)])
        _, pool = self.run_step(pool, chunks=[StepPart(row=1, begin=0, end=4, read=ZERO, write=0)])  # takes the row
        (resumed,), pool = self.run_step(pool, chunks=[StepPart(row=0, begin=4, end=8, read=SAVED, write=1)])
        (token,), _ = self.run_step(pool, singles=[StepPart(row=0, begin=8, end=9, read=1, write=1)])
        self.assert_equals([resumed, token], 0, 4, "tokens after a preemption in the middle of a prompt")


def _make_context(**facts: Any) -> Context:
    return Context(**jax.tree.map(jnp.asarray, facts))


@functools.cache
def _build(suite: type[RecurrentSuite]) -> Any:
    """Build the layer, with parameters that are not at their initial values."""
    layer = suite.config.build(rngs=nnx.Rngs(0), precision=Precision(), **suite.offered)
    rng = np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        value = leaf.get_value()
        leaf.set_value(value + jnp.asarray(NOISE * rng.standard_normal(value.shape), value.dtype))
    return layer


@functools.cache
def _compile_call(suite: type[RecurrentSuite]) -> Callable[..., Any]:
    graph, state = nnx.split(_build(suite))

    def call(x: Any, context: Context, cache: Any) -> Any:
        return nnx.merge(graph, state)(x, context, cache)

    return compile_fast(call)
