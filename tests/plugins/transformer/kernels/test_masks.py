import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_plugins_transformer.kernels.masks import And, Causal, Full, Or, Prefix, Segments, SlidingWindow

LENGTH = 12
IDS = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0], [1] * 12], jnp.int32)
PREFIX = jnp.asarray([3, 0], jnp.int32)

# mask -> whether query q of row b sees key k
CASES = {
    "full": (Full(), lambda b, q, k: True),
    "causal": (Causal(), lambda b, q, k: k <= q),
    "window": (Causal() & SlidingWindow(3), lambda b, q, k: q - 3 < k <= q),
    "window ahead": (SlidingWindow(3), lambda b, q, k: q - 3 < k),
    "segments": (Causal() & Segments(IDS, IDS), lambda b, q, k: k <= q and IDS[b, q] == IDS[b, k]),
    "prefix": (Causal() | Prefix(PREFIX), lambda b, q, k: k <= q or k < PREFIX[b]),
    "all": (
        ((Causal() & SlidingWindow(2)) | Prefix(PREFIX)) & Segments(IDS, IDS),
        lambda b, q, k: (q - 2 < k <= q or k < PREFIX[b]) and IDS[b, q] == IDS[b, k],
    ),
}


def brute(rule):
    return np.array([[[bool(rule(b, q, k)) for k in range(LENGTH)] for q in range(LENGTH)] for b in range(2)])


@pytest.mark.slow_cases("segments")
@pytest.mark.parametrize("name", CASES)
def test_masks_are_what_they_say(name):
    mask, rule = CASES[name]
    expected = brute(rule)
    actual = mask.materialize((0, LENGTH), (0, LENGTH))
    assert (np.broadcast_to(actual, expected.shape) == expected).all()


@pytest.mark.slow_cases("prefix", "segments")
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
    for mask in (Causal(), Causal() & SlidingWindow(5), SlidingWindow(5)):
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
