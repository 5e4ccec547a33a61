"""Rewards that read the rollout."""

import asyncio

import pytest

from axlearn_plugins_rl.rewards.rollout_rewards import EnvironmentReward
from axlearn_plugins_rl.rollout_contracts import Example, Rollout

EXAMPLE = Example(id="sum", prompt="2+3?")


@pytest.mark.parametrize(
    ("finish", "metrics", "value", "error"),
    [
        ("stop", {"environment_reward": 0.5}, 0.5, None),
        ("length", {"environment_reward": -1.0}, -1.0, None),
        ("length", {}, 0.0, None),
        ("stop", {}, 0.0, "returned no reward for the example 'sum'"),
    ],
)
def test_the_environment_judges_a_rollout(finish, metrics, value, error):
    rollout = Rollout(example=EXAMPLE, seed=0, trajectories=(), text="", finish=finish, metrics=metrics)
    (score,) = asyncio.run(EnvironmentReward.Config().build().score([rollout]))
    assert score.value == value
    assert (score.error is None) if error is None else (error in score.error)
