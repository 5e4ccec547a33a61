"""An environment of SkyRL-Gym."""

import asyncio

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.environments.skyrl_environment import SkyrlEnvironment
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from support.needs import require

pytestmark = pytest.mark.slow
require("skyrl_gym")


def play(script, answer="5", name="gsm8k_multi_turn", **settings):
    environment = SkyrlEnvironment.Config(name=name, extras={"max_turns": 3}, **settings)
    source = MultiTurn.Config(environment=environment).build()
    example = Example(id="sum", prompt="2+3?", answer=answer)
    return asyncio.run(source.collect(example, ScriptedPolicy(script), [1, 2]))


def test_a_right_answer_ends_the_episode():
    for rollout in play(lambda context, seed: "#### 5" if "tentative" in context else "#### 4"):
        assert (rollout.finish, rollout.error, rollout.text) == ("stop", None, "#### 5")
        assert rollout.metrics["turns"] == rollout.metrics["steps"] == 2
        assert rollout.metrics["environment_reward"] == pytest.approx(1 + 0.2 / 3)
        assert "tentative" in rollout.messages[2]["content"]


def test_an_answer_may_be_the_extras_of_the_environment():
    extras = {"reward_spec": {"ground_truth": "7"}, "max_turns": 1}
    (rollout, _) = play(lambda context, seed: "#### 7", answer=extras)
    assert (rollout.metrics["turns"], rollout.metrics["environment_reward"]) == (1, 1.0)


def test_a_missing_ground_truth_is_an_error_of_the_rollout():
    (rollout, _) = play(lambda context, seed: "7", answer={"question": "?"})
    assert rollout.finish == "error"
    assert "ground_truth" in rollout.error


def test_an_unknown_environment_names_the_nearest():
    with pytest.raises(RequestError, match="gsm8k"):
        SkyrlEnvironment.Config(name="gsm8").build()
