import asyncio

import pytest

from axlearn_plugins_rl.rollout_contracts import Example, Score
from axlearn_plugins_rl.rollout_jobs import collect_groups, rollout_seed, run_together
from axlearn_plugins_rl.single_turn import SingleTurn
from axlearn_plugins_rl.task_input import Draw
from support.rollout_groups import ConstantPolicy

DRAWS = [Draw(position, Example(id=str(position), prompt="1+1=", answer="2")) for position in (3, 4)]


class Length:
    async def score(self, rollouts):
        return [Score(value=float(rollout.num_drawn)) for rollout in rollouts]


def collect(policy, **options):
    parts = {"policy": policy, "source": SingleTurn.Config().build(), "reward": Length(), "group_size": 3, "seed": 1}
    return asyncio.run(collect_groups(DRAWS, **{**parts, **options}))


def test_each_example_has_a_group_with_a_score_for_each_rollout():
    groups = collect(ConstantPolicy())
    assert [g.example.id for g in groups] == ["3", "4"]
    assert [[s.value for s in g.scores] for g in groups] == [[2.0] * 3] * 2


def test_seeds_depend_on_the_run_the_position_and_the_sample_only():
    one, other = ConstantPolicy(), ConstantPolicy()
    collect(one)
    collect(other)
    assert one.seeds == other.seeds == [rollout_seed(1, p, i) for p in (3, 4) for i in range(3)]
    assert len({*one.seeds, *(rollout_seed(2, p, i) for p in (3, 4) for i in range(3))}) == 12
    assert all(0 <= seed < 2**32 for seed in one.seeds)


def test_a_failure_cancels_the_other_jobs():
    cancelled = []

    async def waits():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("damaged")

    async def run():
        with pytest.raises(ValueError, match="damaged"):
            await run_together([waits(), fails()])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert cancelled == [True]
