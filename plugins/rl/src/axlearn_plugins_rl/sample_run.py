"""Sample rollouts from a model, and score them."""

import asyncio
from typing import Any

import attrs

from axlearn_core.config import Node, find
from axlearn_core.errors import InputError, RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_rl.engine_policy import EnginePolicy
from axlearn_plugins_rl.rl_loop import RLLoop
from axlearn_plugins_rl.rollout_contracts import Group, Reward, RolloutSource, Split, Task
from axlearn_plugins_rl.rollout_jobs import collect_groups
from axlearn_plugins_rl.score_run import build_scored_task
from axlearn_plugins_rl.single_turn import SingleTurn
from axlearn_plugins_rl.task_input import Draw, TaskInput
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.open_engine import open_engine


@attrs.frozen(kw_only=True)
class Parts:
    """The configs of the parts that sample and score.

    Attributes:
        task: The task, or None if there is none.
        reward: Scores the rollouts. None uses the score of the task, or else `exact`.
        source: Turns examples into rollouts.
        policy: The sampling parameters and the engine.
        seed: Seed of the task.
    """

    task: Node[Task] | None = None
    reward: Node[Reward] | None = None
    source: Node[RolloutSource] = SingleTurn.Config()
    policy: Node[EnginePolicy] = EnginePolicy.Config()
    seed: int = 0


def read_parts(run: str, step: int | None = None) -> Parts:
    """Return the parts that a run was trained with. Other runs and imported models have neither a task nor a reward.

    Args:
        run: Path or URI of the model.
        step: Checkpoint; the default is the newest.
    """
    experiment: Any = open_weights(run, step=step).experiment
    parts = Parts(seed=experiment.seed)
    loops: list[RLLoop.Config] = [*find(experiment, RLLoop.Config).values()]
    if loops:
        parts = attrs.evolve(parts, reward=loops[0].reward, source=loops[0].source, policy=loops[0].policy)
    if isinstance(experiment.input, TaskInput.Config):
        parts = attrs.evolve(parts, task=experiment.input.task)
    return parts


def sample_groups(
    run: str, parts: Parts, *, samples: int, split: Split, limit: int | None, seed: int, step: int | None = None
) -> list[Group]:
    """Let a model answer the examples of a task, and score the answers.

    Args:
        run: Path or URI of the model.
        parts: The parts that sample and score.
        samples: Rollouts per example.
        split: The examples to use.
        limit: Maximum number of examples.
        seed: Seed of the rollouts.
        step: Checkpoint; the default is the newest.

    Raises:
        RequestError: The model has no tokenizer, or there are no examples.
    """
    if parts.task is None:
        raise RequestError(
            f"{run} was not trained on a task\n    fix: add --task, such as --task jsonl-task:paths=test.jsonl"
        )
    scored, source = build_scored_task(parts.task, parts.reward, parts.seed), parts.source.build()
    examples = scored.task.examples(split)[:limit]
    if not len(examples):
        raise InputError(f"the task has no {split.replace('_', '-')} examples\n    fix: use another --split")
    policy = parts.policy
    if not isinstance(policy, EnginePolicy.Config):
        raise RequestError(
            f"the policy cannot sample from a run\n    got: {type(policy).__qualname__}\n    expected: engine-policy"
        )
    opened = open_engine(run, config=policy.engine, step=step, warm_up=False)
    with LocalEngine(opened.engine, opened.text) as engine:
        if opened.text is None:
            raise RequestError(f"{run} has no tokenizer, so it cannot answer the prompts of a task")
        jobs = collect_groups(
            [Draw(position, example) for position, example in enumerate(examples)],
            policy=policy.build(engine=engine, text=opened.text),
            source=source,
            reward=scored.reward,
            group_size=samples,
            seed=seed,
        )
        return asyncio.run(jobs)
