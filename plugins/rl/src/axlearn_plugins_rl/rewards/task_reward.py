"""The `task` reward: the task judges the answers to its own examples."""

import functools
from collections.abc import Callable

from axlearn_core.config import node
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_rl.rewards.judge_process import Judge, pack_judge
from axlearn_plugins_rl.rewards.judged_reward import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Example, Rollout, ScoresAnswers, Task
from axlearn_plugins_rl.tasks.chat_task import find_scorer


class TaskReward(JudgedReward):
    """The score that the task itself gives to an answer.

    Args:
        cfg: Config of the reward.
        task: The task with the examples.

    Raises:
        ConfigError: The task does not score answers, or cannot be copied to a worker process.
    """

    @node
    class Config(JudgedReward.Config):
        """No settings, except the handling of failures."""

    def __init__(self, cfg: Config, *, task: Task):
        super().__init__(cfg)
        scorer = find_scorer(task)
        if scorer is None:
            raise ConfigError(
                Problem(
                    path="task",
                    message="does not score answers, which the reward `task` needs",
                    got=type(task).__qualname__,
                    expected="a task with a method score(example, text), such as reasoning-gym",
                    fix="use another reward, such as `exact`",
                )
            )
        self._scorer = scorer
        try:
            pack_judge(self.judge_factory(), type(scorer))  # report an error before the first rollout
        except TypeError as error:
            raise ConfigError(
                Problem(
                    path="task",
                    message=f"cannot be copied to the worker process that scores answers: {error}",
                    got=type(scorer).__qualname__,
                    fix="create what cannot be copied when `score` is called first, for example in a cached property",
                )
            ) from None

    def judge(self, example: Example, text: str) -> float:
        """Return the task's score."""
        return self._scorer.score(example, text)

    def judge_factory(self) -> Callable[[], Judge]:
        """See `JudgedReward`. The task itself is sent to the worker process."""
        return functools.partial(_task_judge, self._scorer)


def _task_judge(scorer: ScoresAnswers) -> Judge:
    def judge(rollout: Rollout) -> float:
        return scorer.score(rollout.example, rollout.text)

    return judge
