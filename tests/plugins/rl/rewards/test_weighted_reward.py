"""The rewards `weighted`, `task`, `length` and `environment`."""

import asyncio
import threading

import pytest

from axlearn_core.config import Decoder, Node, check
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_rl.rewards.rollout_rewards import EnvironmentReward, LengthReward
from axlearn_plugins_rl.rewards.task_reward import TaskReward
from axlearn_plugins_rl.rewards.text_rewards import FormatReward
from axlearn_plugins_rl.rewards.weighted_reward import WeightedReward
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.tasks.chat_task import ChatTask
from support.rl_rewards import Obedient, Sums, rollout_of


def score(reward, *rollouts):
    return asyncio.run(reward.score(rollouts))


def test_weighted_adds_parts():
    data = {"type": "weighted", "parts": {"exact": 1.0, "format": 0.1}}
    config = Decoder(registry()).decode(data, Node)
    scores = score(config.build(), rollout_of("4"), rollout_of("<answer>4</answer>"), rollout_of("5"))
    assert [s.value for s in scores] == pytest.approx([1.0, 1.1, 0.0])
    assert scores[1].parts == {"exact": 1.0, "format": 1.0}


def test_parts_can_have_settings_and_the_task():
    digits = FormatReward.Config(pattern=r"\d")
    config = WeightedReward.Config(parts={"task": 2.0, "digit": -1.0}, rewards={"digit": digits})
    (result,) = score(config.build(task=Sums.Config().build()), rollout_of("4"))
    assert (result.value, result.parts) == (1.0, {"task": 1.0, "digit": 1.0})


def test_a_failed_part_is_an_error():
    config = WeightedReward.Config(
        parts={"a": 1.0, "b": 1.0, "exact": 1.0},
        rewards={"a": Obedient.Config(), "b": Obedient.Config(on_error="zero")},
    )
    good, failed = score(config.build(), rollout_of("3"), rollout_of("raise no"))
    assert (good.value, good.error, good.metrics) == (6.0, None, {"reward_errors": 0.0})
    assert failed.error is not None
    assert failed.error.count("ZeroDivisionError: no") == 1
    assert failed.metrics == {"reward_errors": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": {}}, "parts: is empty"),
        ({"parts": {"exakt": 1.0}}, r"parts.exakt: is neither[^$]*did you mean: exact"),
        ({"parts": {"exact": float("inf")}}, r"parts.exact: is not a finite number"),
        ({"parts": {"exact": 1.0}, "rewards": {"b": FormatReward.Config()}}, r"rewards.b: has no weight"),
    ],
)
def test_invalid_parts_are_reported(options, message):
    with pytest.raises(ConfigError, match=message):
        check(WeightedReward.Config(**options))


def test_parts_must_be_rewards():
    with pytest.raises(ConfigError, match=r"parts.adamw: the component is not a reward"):
        WeightedReward.Config(parts={"adamw": 1.0}).build()
    with pytest.raises(ConfigError, match=r"parts.length: limit"):
        WeightedReward.Config(parts={"length": 1.0}).build()


def test_a_task_scores_below_a_chat_task():
    task = ChatTask.Config(base=Sums.Config()).build(seed=0)
    example = task.examples("train")[0]
    scores = score(
        TaskReward.Config().build(task=task), rollout_of(f"It is {example.answer}", example), rollout_of("?", example)
    )
    assert [s.value for s in scores] == [1.0, 0.0]


def test_tasks_that_do_not_score_are_reported():
    class Silent(Sums):
        score = None

    with pytest.raises(ConfigError, match=r"does not score answers[^$]*got: .*Silent"):
        TaskReward.Config().build(task=Silent.Config().build())


def test_tasks_that_cannot_be_copied_are_reported():
    task = Sums.Config().build()
    task.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be copied to the worker process[^$]*cached property"):
        TaskReward.Config().build(task=task)


def test_length_is_punished_linearly():
    reward = LengthReward.Config(limit=10, margin=4).build()
    scores = score(reward, *(rollout_of("x", drawn=count) for count in (0, 6, 7, 8, 10, 50)))
    assert [s.value for s in scores] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ConfigError, match=r"margin: exceeds the limit"):
        check(LengthReward.Config(limit=3, margin=4))


def test_the_environment_can_judge():
    good, missing, failed = score(
        EnvironmentReward.Config().build(),
        rollout_of("x", metrics={"environment_reward": 0.5}),
        rollout_of("x", Example(id="b", prompt="?")),
        rollout_of("x", finish="error", error="broken"),
    )
    assert (good.value, good.error) == (0.5, None)
    assert missing.error == "the environment returned no reward for the example 'b'"
    assert failed.error == "the rollout failed: broken"
