import asyncio

import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.single_turn import SingleTurn
from support.rollout_groups import ConstantPolicy


def collect(example, policy, seeds):
    return asyncio.run(SingleTurn.Config().build().collect(example, policy, seeds))


def test_each_seed_has_a_rollout_in_order():
    rollouts = collect(Example(id="a", prompt="2+3="), ConstantPolicy(), [7, 5, 6])
    assert [(r.seed, r.text) for r in rollouts] == [(7, "7"), (5, "5"), (6, "6")]
    (trajectory,) = rollouts[0].trajectories
    assert [s.drawn for s in trajectory] == [False, True]
    assert trajectory[0].tokens.tolist() == [*b"2+3="]
    assert trajectory[1].tokens.tolist() == [*b"7", 256]


def test_a_conversation_is_rendered_and_continued():
    messages = ({"role": "user", "content": "2+3"},)
    (rollout,) = collect(Example(id="a", prompt=messages), ConstantPolicy(max_context=64), [5])
    assert bytes(rollout.trajectories[0][0].tokens.tolist()).decode().endswith("Assistant:\n")
    assert rollout.messages == (*messages, {"role": "assistant", "content": "5"})


def test_a_prompt_that_fills_the_context_names_the_example():
    with pytest.raises(
        InputError, match=r"example long leaves no room(?s:.*)got: 4 tokens\n    expected: fewer than 4"
    ):
        collect(Example(id="long", prompt="2+3="), ConstantPolicy(max_context=4), [0])
