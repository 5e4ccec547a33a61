"""Recorded experts of contexts and completions, joined to trajectories."""

import numpy as np

from axlearn_plugins_rl.recorded_experts import join_completion, split_experts
from axlearn_plugins_rl.rollout_contracts import Completion, Segment

LAYERS, TOP_K = 2, 3


def record(start, count):
    """Return experts whose values are the numbers of their positions."""
    positions = np.arange(start, start + count, dtype=np.int16)
    return np.broadcast_to(positions[:, None, None], (count, LAYERS, TOP_K)).copy()


def tokens(count):
    return np.zeros(count, np.int32)


def complete(context, drawn, offset=0):
    """Return a completion of `drawn` tokens. The engine has read all tokens except the last one."""
    before, after = split_experts(record(offset, context + drawn - 1), context, drawn)
    segment = Segment(tokens=tokens(drawn), drawn=True, experts=after)
    return Completion(segment=segment, text="", finish="stop", context_experts=before)


def positions(trajectory):
    return [segment.experts[:, 0, 0].tolist() for segment in trajectory]


def test_the_last_token_has_no_record():
    assert positions(join_completion([Segment(tokens=tokens(2))], complete(2, 3))) == [[0, 1], [2, 3, -1]]


def test_a_turn_completes_the_record_of_the_turn_before_and_keeps_it():
    first = join_completion([Segment(tokens=tokens(2))], complete(2, 3))
    second = join_completion([*first, Segment(tokens=tokens(1))], complete(6, 2, offset=10))
    assert positions(second) == [[0, 1], [2, 3, 14], [15], [16, -1]]


def test_a_policy_without_records_leaves_the_segments_as_they_are():
    assert split_experts(None, 3, 2) == (None, None)
    context, segment = Segment(tokens=tokens(2)), Segment(tokens=tokens(1), drawn=True)
    assert join_completion([context], Completion(segment=segment, text="", finish="stop")) == (context, segment)
