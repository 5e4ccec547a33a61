"""Rows of a step go into the smallest compiled shape that fits, and long prompts into several calls."""

import jax
import numpy as np
import pytest

from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_serving.packing import Packer, sampling_kind
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.token_sampling import DRAWN, FULL, GREEDY

BUCKETS = [StepBucket(rows, chunks, 4, 8, False) for rows, chunks in [(1, 0), (2, 0), (0, 1), (2, 1), (2, 2)]]


def pack(*rows):
    return Packer(BUCKETS, unused=9).pack(rows, [Sampling()] * len(rows))


def decoding(slot):
    return Row(slot=slot, start=3, blocks=(slot,))


def prompt(slot, count, **fields):
    return Row(slot=slot, tokens=tuple(range(1, count + 1)), start=0, blocks=(5, 6, 7), **fields)


def sizes(calls):
    return [(bucket.rows, bucket.chunks) for bucket, *_ in calls]


def test_rows_use_the_smallest_shape_that_fits():
    assert sizes(pack(decoding(0))[0]) == [(1, 0)]
    assert sizes(pack(decoding(0), decoding(1))[0]) == [(2, 0)]
    assert sizes(pack(prompt(0, 4))[0]) == [(0, 1)]
    assert sizes(pack(decoding(1), prompt(0, 5))[0]) == [(2, 2)]


def test_a_prompt_that_does_not_fit_goes_into_more_calls():
    calls, places = pack(decoding(1), prompt(0, 11))
    assert sizes(calls) == [(2, 2), (0, 1)]
    assert places[0].chosen == (0, 0)
    assert places[1].chosen == (1, 0)  # the last chunk is in the second call


def test_each_part_of_a_row_has_its_targets():
    (_, places) = pack(prompt(0, 6, targets=(2, 3, 4, 5, 6, 0), sample=False))
    assert places[0].targets == [(0, 0, 4), (0, 4, 2)]
    assert places[0].chosen is None


@pytest.mark.parametrize(
    ("sampling", "masked", "kind"),
    [
        (Sampling(temperature=0.0), False, GREEDY),
        (Sampling(temperature=0.7), False, DRAWN),
        (Sampling(temperature=0.0), True, FULL),
        (Sampling(temperature=0.0, logit_bias={1: 2.0}), False, FULL),
    ],
)
def test_a_request_needs_the_cheapest_kind_of_sampling(sampling, masked, kind):
    assert sampling_kind(sampling, masked) == kind


def test_rows_are_written_with_their_slots_and_tokens():
    calls, _ = pack(decoding(1), prompt(0, 5))
    bucket, packed, _ = calls[0]
    step = bucket.unpack(np.asarray(packed))
    assert step.slot.tolist()[:2] == [1, 9]
    assert step.tokens.tolist()[2:10] == [1, 2, 3, 4, 5, 0, 0, 0]


def test_embeddings_are_written_at_the_places_of_their_tokens():
    values = np.arange(1.0, 13.0, dtype=np.float32).reshape(6, 2)
    packer = Packer(BUCKETS, 9, jax.ShapeDtypeStruct((2,), np.float32))
    rows = [prompt(0, 6, embeddings=values), Row(slot=1, tokens=(8,), start=4, blocks=(3,), embeddings=values[:1])]
    calls, _ = packer.pack(rows, [Sampling()] * 2)
    assert sizes(calls) == [(2, 2), (0, 1)]
    (_, _, first), (_, packed, second) = calls
    np.testing.assert_array_equal(first.values[first.replaces], values)
    assert first.replaces.tolist() == [True] * 6 + [False] * 2
    np.testing.assert_array_equal(second.values, [[1.0, 2.0], *[[0.0, 0.0]] * 3])
    assert BUCKETS[2].unpack(packed).tokens.tolist() == [8, 0, 0, 0], "a single token with an embedding is in a chunk"
    assert packer.pack([prompt(0, 6)], [Sampling()])[0][0][2] is None
