"""Roll out and score examples."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from axlearn_plugins_rl.rollout_contracts import Group, Policy, Reward, RolloutSource
from axlearn_plugins_rl.task_input import Draw

R = TypeVar("R")


async def collect_groups(
    draws: Sequence[Draw], *, policy: Policy, source: RolloutSource, reward: Reward, group_size: int, seed: int
) -> list[Group]:
    """Roll out and score examples at the same time.

    Args:
        draws: The examples.
        policy: The policy.
        source: Turns an example into rollouts.
        reward: Scores the rollouts of an example.
        group_size: Number of rollouts per example.
        seed: Seed of the rollouts. It is combined with the position of the example.

    Returns:
        One group per example, in order.
    """

    async def collect(draw: Draw) -> Group:
        seeds = [rollout_seed(seed, draw.position, sample) for sample in range(group_size)]
        rollouts = tuple(await source.collect(draw.example, policy, seeds))
        return Group(example=draw.example, rollouts=rollouts, scores=tuple(await reward.score(rollouts)))

    return await run_together(collect(draw) for draw in draws)


def rollout_seed(seed: int, position: int, sample: int) -> int:
    """Return the 32-bit seed of a rollout, from the seed of the run, the position of its example and its number in the group."""
    return int(np.random.SeedSequence((seed % 2**64, position, sample)).generate_state(1)[0])


async def run_together(jobs: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Run coroutines concurrently and return their results in order.

    If one fails, cancel the others, wait until they have ended, and raise the error.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
