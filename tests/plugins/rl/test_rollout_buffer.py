"""The buffer keeps batches exactly, also through a checkpoint."""

import json

import attrs
import numpy as np
import pytest

from axlearn_core.checkpoint.json_arrays import decode_arrays, encode_arrays
from axlearn_plugins_rl.rollout_buffer import RolloutBuffer, merge_batches
from axlearn_plugins_rl.rollout_contracts import Example
from support.rollout_groups import group


def buffer(ahead=1):
    return RolloutBuffer.Config(ahead=ahead).build()


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if attrs.has(type(one)):
        return type(one) is type(other) and all(
            same(getattr(one, a.name), getattr(other, a.name)) for a in attrs.fields(type(one))
        )
    return one == other


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_buffer_admits_weights_up_to_its_age(ahead):
    admitted = [number for number in range(10) if buffer(ahead).admits(number, 4)]
    assert admitted == [*range(4, 5 + ahead)]


def test_a_state_restores_the_batches_bit_for_bit():
    source, chat = buffer(), group((0.5, 0.25), number=2, version=7)
    messages = ({"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"})
    example = Example(id="2", prompt=messages[:1], answer={"value": [5]}, tools=({"name": "add"},))
    rollouts = tuple(attrs.evolve(r, example=example, messages=messages, metrics={"turns": 2.0}) for r in chat.rollouts)
    source.put(3, [group((1.0, 0.0), errors=(1,)), attrs.evolve(chat, example=example, rollouts=rollouts)])
    source.put(2, [group()])
    target = buffer()
    target.set_state(decode_arrays(json.loads(json.dumps(encode_arrays(source.get_state())))))
    assert target.numbers() == [2, 3]
    expected = source.take(3)
    assert same(tuple(expected), tuple(target.take(3)))
    assert target.numbers() == [2]


def test_a_state_keeps_recorded_experts():
    (rollout,) = group((1.0,)).rollouts
    (trajectory,) = rollout.trajectories
    experts = np.arange(2 * 3, dtype=np.int16).reshape(1, 2, 3)
    segments = tuple(attrs.evolve(s, experts=experts.repeat(len(s.tokens), 0)) for s in trajectory)
    batch = [attrs.evolve(group((1.0,)), rollouts=(attrs.evolve(rollout, trajectories=(segments,)),))]
    source, target = buffer(), buffer()
    source.put(0, batch)
    target.set_state(decode_arrays(json.loads(json.dumps(encode_arrays(source.get_state())))))
    assert same(tuple(batch), tuple(target.take(0)))


def test_a_missing_batch_is_an_error():
    with pytest.raises(KeyError):
        buffer().take(0)


def test_batches_of_several_processes_are_merged_in_order():
    states = []
    for process in range(2):
        one = buffer()
        for number in (3, 4):
            one.put(number, [group(number=10 * number + process)])
        states.append(one.get_state())
    merged = merge_batches(RolloutBuffer.Config(ahead=1), states)
    assert {number: [g.example.id for g in groups] for number, groups in merged.items()} == {
        3: ["30", "31"],
        4: ["40", "41"],
    }
