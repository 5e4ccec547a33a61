"""Caches compute attention: custom layouts, kernels by name, and rejected calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.config import Configurable, node
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.errors import RequestError
from axlearn_core.kernels import selection
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.mask_arrays import separate_queries
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp

ATTENTION = "decoder.layer.attention"
SIZE = 4


class Pages(Configurable):
    """Pages of four slots for each row, in reverse order. Attention reads them in place."""

    @node
    class Config(Configurable.Config["Pages"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, num_kv_heads, head_dim, dtype, window=None):
        return CacheEntry(per="page", shape=(SIZE, 2 * num_kv_heads, head_dim), dtype=dtype, page_size=SIZE)

    def attend(self, cache, op, slots, kernel):
        if op.bias is not None:
            raise RequestError("pages take no bias on the scores")
        batch, new, heads, size = op.query.shape
        table = jnp.arange(cache.shape[0], dtype=jnp.int32)[::-1].reshape(batch, -1)
        slots = jnp.broadcast_to(slots, (batch, new))
        pairs = jnp.stack([op.key, op.value], axis=3).reshape(batch, new, -1, size)
        cache = cache.at[jnp.take_along_axis(table, slots // SIZE, axis=1), slots % SIZE].set(pairs)
        starts = jnp.arange(batch + 1, dtype=jnp.int32) * new
        query, lengths, count = op.query.reshape(-1, heads, size), slots[:, -1] + 1, jnp.asarray([batch], jnp.int32)
        mask = separate_queries(op.mask, batch, new)
        paged = PagedAttentionOp(
            query, cache, table, lengths, starts, count, scale=op.scale, softcap=op.softcap, mask=mask
        )
        return paged.run(kernel).reshape(op.query.shape), cache


def decode(model, run, tokens):
    cache = model.init_cache(2, 24)
    parts = []
    for start, end in ((0, 9), (9, 10), (10, 20)):
        logits, cache = run(model, tokens[:, start:end], cache=cache)
        parts.append(logits)
    return jnp.concatenate(parts, 1)


@pytest.mark.slow
def test_a_layout_of_pages_attends_without_dense_keys(tiny, build, run, batch):
    tokens = batch["tokens"][:, :20]
    expected = decode(build(tiny(), 0), run, tokens)
    paged = build(tiny({f"{ATTENTION}.kv_cache": Pages.Config()}), 0)
    np.testing.assert_allclose(decode(paged, run, tokens), expected, rtol=1e-4, atol=1e-5)
    with selection.use(selection.Selection(platform="cpu", gradients=False)) as program:
        jax.eval_shape(lambda: paged(tokens[:, :4], cache=paged.init_cache(2, 24)))
    assert {"paged_attention"} == {c.op.name for c in program.choices if "attention" in c.op.name}


class Recorded:
    """The reference implementation for queries that are not at the keys' positions."""

    def __init__(self):
        self.calls = []

    def supports(self, op, context):
        return "it only reads caches" if op.aligned else None

    def __call__(self, op):
        self.calls.append(op.abstract())
        return op.reference()


RECORDED = Recorded()


def test_a_kernel_that_the_config_names_holds_with_a_cache(tiny, build, batch, monkeypatch):
    model = build(tiny({f"{ATTENTION}.kernel": "reading", f"{ATTENTION}.softcap": 3.0, f"{ATTENTION}.window": 5}), 0)
    declaration = KernelImplementation(name="reading", op=AttentionOp.path(), load=f"{__name__}:RECORDED")
    installed = selection.installed
    declared = lambda op: [*installed(op), *([declaration] if op is AttentionOp else [])]  # noqa: E731
    monkeypatch.setattr(RECORDED, "calls", [])
    with selection.use(selection.Selection(platform="cpu", gradients=False, declared=declared)):
        jax.eval_shape(lambda: model(batch["tokens"][:, :4], cache=model.init_cache(2, 24)))
        with pytest.raises(RequestError, match=r"'reading' cannot do this\n.*\n.*it only reads caches"):
            jax.eval_shape(lambda: model(batch["tokens"][:, :4]))
    assert RECORDED.calls
    for op in RECORDED.calls:
        assert (op.softcap, op.mask.describe(), op.key.shape[1]) == (3.0, "causal & slidingwindow(5)", 24)
        assert op.query_slots.shape == (1, 4)


@pytest.mark.slow
def test_a_named_kernel_that_cannot_read_a_cache_is_refused(tiny, build, batch):
    model = build(tiny({f"{ATTENTION}.kernel": "xla-blocked"}), 0)
    with pytest.raises(
        RequestError, match=r"'xla-blocked' cannot do this\n.*aligned=False.*\n.*not the same positions\n.*fix:"
    ):
        model(batch["tokens"][:, :4], cache=model.init_cache(2, 24))


class Appending(Configurable):
    """A layout with the interface of earlier versions."""

    @node
    class Config(Configurable.Config["Appending"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, num_kv_heads, head_dim, dtype, window=None):
        raise AssertionError

    def append(self, cache, key, value, slots):
        raise AssertionError


def test_a_layout_that_cannot_attend_is_named(tiny, build):
    model = build(tiny({f"{ATTENTION}.kv_cache": Appending.Config()}), 0)
    with pytest.raises(RequestError, match=r"cache layout Appending has no method `attend`\n(.*\n)+.*fix:"):
        model.init_cache(2, 24)


def test_a_cache_and_packed_rows_do_not_go_together(tiny, build, batch):
    model = build(tiny(), 0)
    tokens = batch["tokens"][:, :4]
    with pytest.raises(RequestError, match="leave out segment_ids"):
        jax.eval_shape(lambda: model(tokens, segment_ids=jnp.ones_like(tokens), cache=model.init_cache(2, 24)))
