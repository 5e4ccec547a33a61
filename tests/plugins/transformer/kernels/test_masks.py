import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.nn.layer import Context
from axlearn_plugins_transformer.kernels import masks
from axlearn_plugins_transformer.kernels.masks import (
    And,
    Causal,
    Chunks,
    FixedPrefix,
    Full,
    Or,
    Prefix,
    Segments,
    SelectedKeys,
    SlidingWindow,
)

LENGTH = 12
IDS = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0], [1] * 12], jnp.int32)
PREFIX = jnp.asarray([3, 0], jnp.int32)

POSITIONS = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1], [*range(12)]], jnp.int32)
FIRST = jnp.arange(LENGTH, dtype=jnp.int32)[None] - POSITIONS % 2
SELECTED = jnp.asarray(np.random.default_rng(0).integers(-3, LENGTH, (2, LENGTH, 4)), jnp.int32)

# mask -> whether query q of row b sees key k
CASES = {
    "full": (Full(), lambda b, q, k: True),
    "causal": (Causal(), lambda b, q, k: k <= q),
    "window": (Causal() & SlidingWindow(3), lambda b, q, k: q - 3 < k <= q),
    "window ahead": (SlidingWindow(3), lambda b, q, k: q - 3 < k),
    "segments": (Causal() & Segments(IDS, IDS), lambda b, q, k: k <= q and IDS[b, q] == IDS[b, k]),
    "prefix": (Causal() | Prefix(PREFIX), lambda b, q, k: k <= q or k < PREFIX[b]),
    "chunks": (Causal() & Chunks(5), lambda b, q, k: k <= q and k // 5 == q // 5),
    "packed chunks": (
        Causal() & Chunks(2, FIRST, FIRST),
        lambda b, q, k: k <= q and IDS[b, q] == IDS[b, k] and POSITIONS[b, q] // 2 == POSITIONS[b, k] // 2,
    ),
    "fixed prefix": (Causal() | FixedPrefix(5), lambda b, q, k: k <= q or k < 5),
    "packed prefix": (
        (Causal() | FixedPrefix(3, POSITIONS)) & Segments(IDS, IDS),
        lambda b, q, k: (k <= q or POSITIONS[b, k] < 3) and IDS[b, q] == IDS[b, k],
    ),
    "selected": (Causal() & SelectedKeys(SELECTED), lambda b, q, k: k <= q and k in np.asarray(SELECTED[b, q])),
    "all": (
        ((Causal() & SlidingWindow(2)) | Prefix(PREFIX)) & Segments(IDS, IDS),
        lambda b, q, k: (q - 2 < k <= q or k < PREFIX[b]) and IDS[b, q] == IDS[b, k],
    ),
}


def brute(rule):
    return np.array([[[bool(rule(b, q, k)) for k in range(LENGTH)] for q in range(LENGTH)] for b in range(2)])


@pytest.mark.slow_cases("segments", "chunks", "fixed prefix")
@pytest.mark.parametrize("name", CASES)
def test_masks_are_what_they_say(name):
    mask, rule = CASES[name]
    expected = brute(rule)
    actual = mask.materialize((0, LENGTH), (0, LENGTH))
    assert (np.broadcast_to(actual, expected.shape) == expected).all()


@pytest.mark.slow_cases("prefix", "segments", "packed chunks", "packed prefix", "chunks")
@pytest.mark.parametrize("name", CASES)
def test_mask_parts_are_slices_of_the_whole_and_blocks_are_correct(name):
    mask, rule = CASES[name]
    expected = brute(rule)
    edges = [(0, 4), (4, 8), (8, 12), (2, 7)]
    for q, k in itertools.product(edges, edges):
        part = expected[:, slice(*q), slice(*k)]
        assert (np.broadcast_to(mask.materialize(q, k), part.shape) == part).all()
        block = mask.block(q, k)
        assert block is None or (part == block).all()


def test_causal_and_window_masks_classify_every_block():
    for mask in (Causal(), Causal() & SlidingWindow(5), SlidingWindow(5), Chunks(4), FixedPrefix(6)):
        for q, k in itertools.product(((0, 3), (3, 6), (6, 9), (9, 12)), repeat=2):
            part = np.asarray(mask.materialize(q, k))
            truth = True if part.all() else False if not part.any() else None
            assert mask.block(q, k) is truth, (mask, q, k)


def test_slots_count_instead_of_indices():
    mask = Causal() & SlidingWindow(4)
    query_slots = jnp.asarray([[5], [2]], jnp.int32)
    actual = mask.materialize((0, 1), (0, 8), query_slots, jnp.arange(8, dtype=jnp.int32)[None])
    assert actual.shape == (2, 1, 8)
    assert [np.flatnonzero(row[0]).tolist() for row in np.asarray(actual)] == [[2, 3, 4, 5], [0, 1, 2]]


def test_structure_is_static_and_data_are_leaves():
    mask = Causal() & SlidingWindow(4) & Segments(IDS, IDS)
    assert isinstance(mask, And)
    assert len(mask.parts) == 3
    assert len(jax.tree.leaves(mask)) == 2
    assert mask.describe() == "causal & segments & slidingwindow(4)"
    assert (Causal() | Prefix(PREFIX)).describe() == "(causal | prefix)"
    assert isinstance(Causal() | Prefix(PREFIX), Or)
    assert hash(Causal() & SlidingWindow(4)) == hash(Causal() & SlidingWindow(4))
    assert Causal() & SlidingWindow(4) != Causal() & SlidingWindow(5)
    other = jax.tree.map(lambda x: x + 1, mask)
    assert jax.tree.structure(other) == jax.tree.structure(mask)


@pytest.mark.parametrize("name", [name for name in CASES if name != "window ahead"])
def test_limits_of_masks_hold_for_every_pair(name):
    mask, rule = CASES[name]
    pairs = brute(rule)
    for row in pairs:
        for query, keys in enumerate(row):
            places = np.flatnonzero(keys)
            later = places[places > query]
            assert not later.size or later[-1] < mask.lookahead()
            assert not places.size or mask.reach() is None or query - places[0] < mask.reach()
            first = mask.first_slot(query)
            assert not places.size or first is None or places[0] >= first
            assert mask.most_keys() is None or places.size <= mask.most_keys()


def test_limits_of_masks_are_tight():
    chunks, window = Causal() & Chunks(4), Causal() & SlidingWindow(3)
    assert [m.reach() for m in (Causal(), window, chunks, window & Chunks(4), window | Chunks(4))] == [None, 3, 4, 3, 4]
    assert [int(chunks.first_slot(q)) for q in (0, 3, 4, 9)] == [0, 0, 4, 8]
    assert int((window & Chunks(4)).first_slot(9)) == 8
    assert int((window | Chunks(4)).first_slot(9)) == 7
    assert [m.lookahead() for m in (Causal(), chunks, Causal() | FixedPrefix(3))] == [0, 0, 3]
    assert (Causal() | Prefix(PREFIX)).lookahead() == masks.UNKNOWN_PREFIX
    assert (window | FixedPrefix(2)).most_keys() == 5
    assert (Causal() & SelectedKeys(SELECTED)).most_keys() == 4
    assert (window & SelectedKeys(SELECTED)).most_keys() == 3


def test_fewer_visible_pairs_are_counted():
    square = 256 * 256
    triangles = 4 * 64 * 64 / 2
    assert masks.visible_pairs(Causal() & Chunks(64), 256, 256) == pytest.approx(triangles / square)
    ids = jnp.ones((1, 256), jnp.int32)
    assert masks.visible_pairs(Causal() & Chunks(64) & Segments(ids, ids), 256, 256) == pytest.approx(
        triangles / square
    )
    selected = Causal() & SelectedKeys(jnp.zeros((1, 256, 16), jnp.int32))
    assert masks.visible_pairs(selected, 256, 256) == pytest.approx((16 * 256 - 16 * 16 / 2) / square, rel=0.01)
    assert masks.visible_keys(selected, 256) == 16 / 256
    assert masks.visible_keys(Causal() & SlidingWindow(300), 256) == 1
    assert masks.visible_keys(Causal(), 256) == 1


def test_masks_of_a_context():
    packed = Context(segment_ids=IDS, positions=POSITIONS)
    for mask, name in ((Causal() & masks.chunked(packed, 2), "packed chunks"),
                       (masks.with_prefix(packed, 3), "packed prefix")):  # fmt: skip
        expected = brute(CASES[name][1])
        assert (np.broadcast_to(mask.materialize((0, LENGTH), (0, LENGTH)), expected.shape) == expected).all()
    assert masks.chunked(Context(), 2) == Chunks(2)
    assert masks.with_prefix(Context(), 3).describe() == "(causal | fixedprefix(3))"
    assert not jax.tree.leaves(masks.with_prefix(Context(positions=POSITIONS), 3))
