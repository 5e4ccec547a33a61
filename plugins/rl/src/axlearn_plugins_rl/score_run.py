"""Score rollouts of a task, and summarize the scores."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from axlearn_core.config import Node
from axlearn_core.errors import InputError, RequestError
from axlearn_plugins_rl.prompts import content
from axlearn_plugins_rl.rewards.task_reward import TaskReward
from axlearn_plugins_rl.rewards.text_rewards import ExactReward
from axlearn_plugins_rl.rollout_contracts import Example, Group, Reward, Split, Task
from axlearn_plugins_rl.rollout_metrics import mean_pass_at, summarize_groups
from axlearn_plugins_rl.tasks.chat_task import find_scorer


@attrs.frozen(kw_only=True)
class ScoredTask:
    """A task with a reward.

    Attributes:
        task: The task.
        reward: Scores the rollouts.
    """

    task: Task
    reward: Reward


def build_scored_task(task: Node[Any], reward: Node[Any] | None, seed: int) -> ScoredTask:
    """Build a task and a reward for it.

    Args:
        task: Config of the task.
        reward: Config of the reward. None uses the score of the task, or else `exact`.
        seed: Seed of the task.

    Raises:
        RequestError: A component is not a task or not a reward.
    """
    built = task.build(seed=seed)
    if not isinstance(built, _HasExamples):
        raise RequestError(f"the component is not a task\n    got: {type(built).__qualname__}")
    if reward is None:
        reward = ExactReward.Config() if find_scorer(built) is None else TaskReward.Config()  # type: ignore[arg-type]
    scorer = reward.build(task=built)
    if not isinstance(scorer, _ScoresRollouts):
        raise RequestError(f"the component is not a reward\n    got: {type(scorer).__qualname__}")
    return ScoredTask(task=built, reward=scorer)  # type: ignore[arg-type]


@runtime_checkable
class _HasExamples(Protocol):
    def examples(self, split: Split) -> Sequence[Example]: ...


@runtime_checkable
class _ScoresRollouts(Protocol):
    async def score(self, rollouts: Any) -> Any: ...


def score_groups(groups: Sequence[Group], scored: ScoredTask) -> list[Group]:
    """Score existing rollouts again.

    Args:
        groups: The rollouts. Their examples may have only an id.
        scored: The task, and the reward.

    Returns:
        Groups with the examples of the task and the new scores.

    Raises:
        InputError: The task does not have an example, or has a different one with the same id.
    """
    examples = {example.id: example for split in ("train", "held_out") for example in scored.task.examples(split)}

    async def score(group: Group) -> Group:
        example = _match_example(group.example, examples)
        rollouts = tuple(attrs.evolve(rollout, example=example) for rollout in group.rollouts)
        return Group(example=example, rollouts=rollouts, scores=tuple(await scored.reward.score(rollouts)))

    async def score_all() -> list[Group]:
        return await asyncio.gather(*map(score, groups))

    return asyncio.run(score_all())


def _match_example(example: Example, examples: Mapping[str, Example]) -> Example:
    match = examples.get(example.id)
    if match is None:
        raise InputError(
            f"the task has no example {example.id!r}\n    got: {len(examples)} examples, such as {next(iter(examples))!r}\n"
            "    fix: use the task and the seed that the rollouts were sampled with"
        )
    if example.prompt and content(example) != json.loads(json.dumps(content(match))):
        raise InputError(
            f"the example {example.id!r} of the task differs from that of the rollouts\n    got: {_shorten(match)}\n"
            f"    expected: {_shorten(example)}\n    fix: use the task and the seed that the rollouts were sampled with"
        )
    return match


def _shorten(example: Example) -> str:
    text = json.dumps(content(example), ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:120]}..."


def summarize_scores(groups: Sequence[Group], *, attempts: Sequence[int] = (), solved: float = 1.0) -> dict[str, float]:
    """Summarize the scores of groups.

    Args:
        groups: Groups of scored rollouts.
        attempts: Numbers k of attempts for pass@k. Groups with fewer rollouts are left out.
        solved: Smallest reward of a rollout that solves its example.

    Returns:
        `examples`, `rollouts`, the scalars of `summarize_groups`, and `pass_at_<k>`, the probability that one of k attempts
        solves an example; see `mean_pass_at`. `reward_stderr` and `pass_at_<k>_stderr` are standard errors of means over
        examples.
    """
    scored = [[s.value for s in group.scores if s.error is None] for group in groups]
    means = [float(np.mean(values)) for values in scored if values]
    summary: dict[str, float] = {"examples": len(groups), "rollouts": sum(len(group.rollouts) for group in groups)}
    summary |= summarize_groups(groups)
    if means:
        summary |= _mean_and_error("reward", means)
    for k in attempts:
        estimates = [mean_pass_at([group], k, solved) for group in groups if len(group.scores) >= k]
        if estimates:
            summary |= _mean_and_error(f"pass_at_{k}", estimates)
    return summary


def _mean_and_error(name: str, values: Sequence[float]) -> dict[str, float]:
    mean = {name: float(np.mean(values))}
    return (
        mean if len(values) < 2 else mean | {f"{name}_stderr": float(np.std(values, ddof=1)) / math.sqrt(len(values))}
    )
