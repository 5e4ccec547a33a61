"""The reference of paged attention under any mask is that of contiguous keys."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.mask_arrays import select_tokens, separate_queries
from axlearn_plugins_transformer.kernels.masks import (
    Causal,
    Chunks,
    FixedPrefix,
    Prefix,
    Segments,
    SelectedKeys,
    SlidingWindow,
)
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.kernels.paged_split import XLA_SPLIT

RNG = np.random.default_rng(0)
LENGTH, SLOTS, HEADS, SIZE = 16, 4, 2, 8
OWN = np.arange(LENGTH)[None, :, None]
CHOSEN = jnp.asarray(np.concatenate([RNG.integers(0, LENGTH, (1, LENGTH, 3)), OWN], axis=-1), jnp.int32)
IDS = jnp.asarray(np.arange(LENGTH)[None] // 7, jnp.int32)
MASKS = {
    "window": Causal() & SlidingWindow(5),
    "chunks": Causal() & Chunks(6),
    "prefix": Causal() | FixedPrefix(9) | Prefix(jnp.asarray([3], jnp.int32)),
    "documents": Causal() & Segments(IDS, IDS),
    "selected": (Causal() & SelectedKeys(CHOSEN)) | FixedPrefix(2),
}


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


def calls(mask):
    """Return attention over a row, and over its pages for the last token, three tokens and the tokens before them."""
    query, key, value = (normal(1, LENGTH, HEADS, SIZE) for _ in range(3))
    dense = AttentionOp(query, key, value, mask=mask, scale=0.3)
    pages = jnp.stack([key[0], value[0]], axis=2).reshape(LENGTH // SLOTS, SLOTS, 2 * HEADS, SIZE)
    order = jnp.asarray([2, 0, 3, 1], jnp.int32)
    new = np.asarray([LENGTH - 1, *range(10, 13), *range(13, 16)])
    table = jnp.tile(jnp.argsort(order)[None], (3, 1)).astype(jnp.int32)
    lengths, starts = jnp.asarray([16, 13, 16], jnp.int32), jnp.asarray([0, 1, 4, 7], jnp.int32)
    separate = select_tokens(separate_queries(mask, 1, LENGTH), jnp.asarray(new))
    operands = query[0, new], pages[order], table, lengths, starts, jnp.asarray([3], jnp.int32)
    return dense, PagedAttentionOp(*operands, mask=separate, scale=0.3, split=Split(1, 3)), new


@pytest.mark.slow_cases("window", "chunks", "documents", "prefix")
@pytest.mark.parametrize("name", MASKS)
def test_pages_give_the_results_of_a_row(name):
    dense, paged, new = calls(MASKS[name])
    expected = np.asarray(dense.reference())[0, new]
    for compute in (paged.reference, lambda: XLA_SPLIT(paged)):
        np.testing.assert_allclose(jax.jit(compute)(), expected, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, jnp.asarray([0.5, 1.0, -1.0, 2.0])], ids=["plain", "sinks"])
def test_pages_give_the_log_sum_exp_of_a_row(sinks):
    dense, paged, new = calls(Causal())
    options = {"log_sum_exp": True, "sinks": None if sinks is None else sinks[:HEADS]}
    expected = [np.asarray(x)[0, new] for x in attrs.evolve(dense, **options).reference()]
    paged = attrs.evolve(paged, **options)
    for compute in (paged.reference, lambda: XLA_SPLIT(paged)):
        actual = jax.jit(compute)()
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    assert paged.options()["log_sum_exp"] is True
    assert "log_sum_exp" in paged.extras()


@pytest.mark.parametrize("count", [1, HEADS - 1, HEADS + 1])
def test_sinks_of_another_length_are_refused(count):
    for op in calls(Causal())[:2]:
        message = (
            rf"{op.name}: the sinks do not fit[\s\S]*got: sinks of shape \[{count}\][\s\S]*expected: .*\[{HEADS}\]"
        )
        with pytest.raises(RequestError, match=message):
            attrs.evolve(op, sinks=jnp.zeros(count))


def test_the_mask_is_an_extra_unless_it_is_a_causal_window():
    _, op, _ = calls(Causal())
    assert (op.extras(), op.window, op.options()["window"]) == ((), None, None)
    assert "mask" not in op.options(), "run locks of earlier versions have no such option"
    windows = attrs.evolve(op, mask=Causal() & SlidingWindow(5) & SlidingWindow(3))
    assert (windows.extras(), windows.window) == ((), 3)
    assert windows != op
    for mask in (SlidingWindow(3), Causal() & Chunks(4), Causal() | FixedPrefix(3)):
        assert attrs.evolve(op, mask=mask).extras() == ("mask",)
        assert attrs.evolve(op, mask=mask).options()["mask"] == mask.describe()
    sinks = attrs.evolve(op, mask=Causal() & Chunks(4), sinks=jnp.zeros(HEADS))
    assert sinks.extras() == ("sinks", "mask")


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 9), (6, 0), (6, 3), (6, 10)])
def test_flops_for_a_request_count_the_keys_that_it_reads(new, cached, window):
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 8), (2,), (3,), (1,))]
    query, pages = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6, 16), (8, 4, 4, 16)))
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    op = PagedAttentionOp(query, pages, *ints, scale=1.0, mask=mask)
    keys = sum(min(cached + i, window or 10**6) for i in range(1, new + 1))
    assert op.request_flops(new, cached) == 2 * 2 * 6 * 16 * keys
