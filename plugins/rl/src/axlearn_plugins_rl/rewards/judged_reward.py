"""Base classes for rewards that judge one rollout at a time."""

import asyncio
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsFloat

import attrs

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import WorkError
from axlearn_core.run.notices import log_message
from axlearn_plugins_rl.rewards.judge_process import Judge, JudgeFailed, pack_judge, shared_pool
from axlearn_plugins_rl.rollout_contracts import Example, Rollout, Score

ERRORS = "reward_errors"
"""Metric of a score: 1 if the reward failed, otherwise 0."""


REPORTED = 10
"""Number of different failures of a reward to log. All of them are counted."""


class JudgedReward(Configurable):
    """A reward that judges the answer of each rollout with `judge`, a method of the subclass.

        class Near(JudgedReward):
            def judge(self, example, text):
                return -abs(float(text) - example.answer)

    The method runs in a worker process, in which the reward is built again from its config. It may therefore raise an error,
    never return, or end the process, and the training goes on.
    """

    @node
    class Config(Configurable.Config["JudgedReward"]):
        """Handling of failures.

        Attributes:
            seconds: Time limit for one rollout.
            retries: How often to judge a rollout again after a failure.
            on_error: What to do if the last try fails. `drop` does not train on the rollout, `zero` gives it the reward 0, and
                `stop` ends the training with an error.
            workers: Number of worker processes. Rewards with the same number share them.
        """

        seconds: float = setting(default=10.0, gt=0, kind="execution")
        retries: int = setting(default=0, ge=0, kind="execution")
        on_error: Literal["drop", "zero", "stop"] = "drop"
        workers: int = setting(default=1, ge=1, le=1024, kind="execution")

    def __init__(self, cfg: Config):
        self.config = cfg
        self._reported: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the reward in messages."""
        return type(self).__qualname__

    @abstractmethod
    def judge(self, example: Example, text: str) -> "SupportsFloat | Score":
        """Return the reward of an answer: a finite number, or a `Score`.

        Args:
            example: The example.
            text: Text of the last answer.
        """
        ...

    def judge_rollout(self, rollout: Rollout) -> "SupportsFloat | Score":
        """Return the reward of a rollout. Override this method to use more than the text, such as the conversation."""
        return self.judge(rollout.example, rollout.text)

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return a score for each rollout; see `axlearn_plugins_rl.rollout_contracts.Reward`.

        Raises:
            WorkError: A rollout cannot be judged, and `on_error` is `stop`.
        """
        scores = {i: score for i, rollout in enumerate(rollouts) if (score := failed_score(rollout)) is not None}
        missing = [i for i in range(len(rollouts)) if i not in scores]
        problems: dict[int, str] = {}
        for _ in range(self.config.retries + 1):
            results = await self._judge_all([rollouts[i] for i in missing])
            for i, result in zip(missing, results, strict=True):
                if isinstance(result, JudgeFailed):
                    problems[i] = str(result)
                else:
                    scores[i] = attrs.evolve(result, metrics={**result.metrics, ERRORS: 0.0})
            missing = [i for i in missing if i not in scores]
        scores |= {i: self._fail(rollouts[i], problems[i]) for i in missing}
        return [scores[i] for i in range(len(rollouts))]

    async def _judge_all(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return a `Score` or a `JudgeFailed` for each rollout. Workers judge equal parts of them at the same time."""
        cfg, calls = self.config, [(rollout,) for rollout in rollouts]
        size = -(-len(calls) // cfg.workers) or 1
        parts = [calls[i : i + size] for i in range(0, len(calls), size)]
        pool = shared_pool(cfg.workers)
        futures = [asyncio.wrap_future(pool.submit_all(self._judge, part, cfg.seconds)) for part in parts]
        return [result for part in await asyncio.gather(*futures) for result in part]

    def judge_factory(self) -> Callable[[], Judge]:
        """Return a function that a worker process calls once to create its judge of rollouts."""
        return functools.partial(_build_judge, self.config)

    @functools.cached_property
    def _judge(self) -> bytes:
        return pack_judge(functools.partial(_check_judge, self.judge_factory()), type(self))

    def _fail(self, rollout: Rollout, problem: str) -> Score:
        message = f"the reward {self.name} failed for the example {rollout.example.id!r}: {problem}"
        if self.config.on_error == "stop":
            raise WorkError(
                f"{message}\n    text: {rollout.text[-200:]!r}\n    fix: repair the reward, or set its on_error to drop or zero"
            )
        if problem not in self._reported and len(self._reported) < REPORTED:
            self._reported.add(problem)
            log_message(f"warning: {message}")
        error = message if self.config.on_error == "drop" else None
        return Score(value=0.0, error=error, metrics={ERRORS: 1.0})


def failed_score(rollout: Rollout) -> Score | None:
    """Return the score of a rollout whose environment failed, or None for other rollouts."""
    return Score(value=0.0, error=f"the rollout failed: {rollout.error}") if rollout.finish == "error" else None


def _build_judge(cfg: JudgedReward.Config) -> Judge:
    return cfg.build().judge_rollout


def _check_judge(factory: Callable[[], Judge]) -> Judge:
    judge = factory()
    return lambda rollout: to_score(judge(rollout))


def to_score(value: Any) -> Score:
    """Return the result of a judge as a score.

    Raises:
        TypeError: The result is neither a number nor a score.
        ValueError: A number is not finite.
    """
    score = value if isinstance(value, Score) else None
    if score is None:
        if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
            raise TypeError(f"returned {value!r:.80}; expected: a number, or a Score")
        score = Score(value=float(value))
    for number in (score.value, *score.parts.values(), *score.metrics.values()):
        if not math.isfinite(number):
            raise ValueError(f"returned {number}; expected: a finite number")
    return score
