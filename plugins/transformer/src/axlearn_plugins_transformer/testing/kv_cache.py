"""The conformance suite for layouts of key-value caches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.cache_spec import empty_cache
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Chunks, Mask, SlidingWindow
from axlearn_plugins_transformer.kv_cache import build_cache
from axlearn_testing.common import assert_close, compile_fast

B, S, N, K, H = 2, 12, 4, 2, 8
"""Rows, tokens per row, query heads, key-value heads, head size."""


class KVCacheSuite:
    """Tests that attention through the cache equals attention over all tokens at once.

    Attributes:
        config: Config of the layout.
        tolerance: Relative tolerance for float32 results, in the norm of each array. Set it higher for layouts that round.
        length: Number of slots in the cache.
    """

    config: Node[Any]
    tolerance: float = 1e-5
    length: int = 16

    def tokens(self, dtype: str = "float32", mask: Mask | None = None, **options: Any) -> AttentionOp:
        """Return attention over all tokens at once.

        Queries are [B, S, N, H]. Keys and values are [B, S, K, H].
        """
        rng = np.random.default_rng(0)
        draws = (rng.standard_normal((B, S, n, H), np.float32) for n in (N, K, K))
        query, key, value = (jax.device_put(x.astype(jnp.dtype(dtype))) for x in draws)
        return AttentionOp(query, key, value, mask=mask or Causal(), scale=H**-0.5, **options)

    def empty(self, dtype: str = "float32") -> Any:
        """Return an empty cache of `length` slots."""
        return empty_cache(build_cache(self.config).spec(K, H, dtype), B, self.length)

    def attend(self, cache: Any, op: AttentionOp, rows: Sequence[Any], slots: Any, kernel: str | None = None) -> Any:
        """Attend for some tokens of each row (slices or indices).

        Return (result, new cache).

        `slots` [B or 1, number of tokens] are the slots of these tokens.
        """
        # NumPy selects the tokens, because JAX would compile a program for each of these operations.
        arrays = (np.asarray(x) for x in (op.query, op.key, op.value))
        new_tokens = [np.stack([x[b, row] for b, row in enumerate(rows)]) for x in arrays]
        return _compile_step(self, op, kernel)(cache, *new_tokens, np.asarray(slots, np.int32))

    def step(self, cache: Any, op: AttentionOp, slots: jax.Array, kernel: str | None = None) -> Any:
        """Call the layout once, with the op's tokens at `slots` [B or 1, S].

        Return (result, new cache).
        """
        return build_cache(self.config).attend(cache, op, slots, kernel)

    def expect(self, op: AttentionOp) -> np.ndarray:
        """Return the results of attention over all tokens at once."""

        def call(query: Any, key: Any, value: Any) -> Any:
            return attrs.evolve(op, query=query, key=key, value=value).reference()

        return np.asarray(compile_fast(call)(op.query, op.key, op.value))

    def decode(self, op: AttentionOp, chunks: Sequence[int], rows: int = 1) -> np.ndarray:
        """Attend to all tokens in chunks and return the results.

        `rows` is the first dimension of the slots.
        """
        cache, results, begin = self.empty(str(op.value.dtype)), [], 0
        for size in chunks:
            part = slice(begin, begin + size)
            slots = np.tile(np.arange(begin, begin + size), (rows, 1))
            result, cache = self.attend(cache, op, [part] * B, slots)
            results.append(np.asarray(result))
            begin += size
        return np.concatenate(results, axis=1)

    @pytest.mark.parametrize(
        "chunks", [(1,) * S, (S,), (5, 1, 6), (7,) + (1,) * 5], ids=["tokens", "one", "odd", "prefill"]
    )
    def test_chunks_are_the_whole(self, chunks: tuple[int, ...]) -> None:
        op = self.tokens()
        assert_close(self.decode(op, chunks), self.expect(op), self.tolerance, f"chunks of {chunks}")

    def test_a_row_of_slots_for_each_row_is_one_for_all(self) -> None:
        op = self.tokens()
        assert_close(self.decode(op, (5, 1, 6), rows=B), self.expect(op), self.tolerance, "slots [B, S]")

    def test_rows_may_be_at_different_slots(self) -> None:
        op, ahead, behind = self.tokens(), 8, 3
        other = np.r_[
            0:behind, S - (ahead - behind) : S
        ]  # the second row continues with tokens that are overwritten below
        _, cache = self.attend(self.empty(), op, [np.arange(ahead), other], np.arange(ahead)[None])
        expected = self.expect(op)
        for step in range(S - ahead):  # the second row goes back and overwrites its slots
            position = (ahead + step, behind + step)
            result, cache = self.attend(cache, op, [slice(t, t + 1) for t in position], [[t] for t in position])
            for row, t in enumerate(position):
                assert_close(np.asarray(result)[row, 0], expected[row, t], self.tolerance, f"row {row}, slot {t}")

    @pytest.mark.parametrize(
        ("mask", "softcap"),
        [(Causal() & SlidingWindow(4), None), (Causal() & Chunks(5), None), (Causal(), 2.0)],
        ids=["window", "chunks", "softcap"],
    )
    def test_what_it_does_not_support_it_refuses(self, mask: Mask, softcap: float | None) -> None:
        op = self.tokens(mask=mask, softcap=softcap)
        try:
            result = self.decode(op, (5, *[1] * (S - 5)))
        except RequestError as error:
            pytest.skip(f"needs a layout with masks and soft caps: {error}")
        assert_close(result, self.expect(op), self.tolerance, "mask or soft cap")

    def test_the_cache_keeps_its_shape(self) -> None:
        cache = self.empty()
        _, new = self.attend(cache, self.tokens(), [slice(0, 3)] * B, np.arange(3)[None])
        like = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (cache, new)]
        assert like[0] == like[1], "a step must not change the structure of the cache"

    def test_results_are_in_the_dtype_of_the_values(self) -> None:
        op = self.tokens("bfloat16")
        result = self.decode(op, (5, 1, 6))
        expected = self.expect(op)
        assert (result.shape, result.dtype) == (expected.shape, jnp.bfloat16)
        assert_close(result, expected, max(3e-2, self.tolerance), "bfloat16")

    def test_compiled_or_not_it_is_the_same(self) -> None:
        op = self.tokens()
        slots = jnp.arange(S, dtype=jnp.int32)[None]
        eager, _ = self.step(self.empty(), op, slots)
        assert_close(self.decode(op, (S,)), eager, max(1e-6, self.tolerance), "under jit")

    def test_an_unknown_kernel_is_refused(self) -> None:
        with pytest.raises(RequestError):
            self.attend(self.empty(), self.tokens(), [slice(0, 1)] * B, [[0]], kernel="no-such-kernel")


# The chunks of a test share the programs of an op.
@functools.lru_cache(maxsize=4)
def _compile_step(suite: KVCacheSuite, op: AttentionOp, kernel: str | None) -> Callable[..., Any]:
    def call(cache: Any, query: Any, key: Any, value: Any, slots: Any) -> Any:
        return suite.step(cache, attrs.evolve(op, query=query, key=key, value=value), slots, kernel)

    return compile_fast(call)
