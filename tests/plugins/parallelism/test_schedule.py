"""Every microbatch passes through every chunk of layers once, in order, and its inputs are always ready."""

import pytest

from axlearn_plugins_parallelism.schedule import Schedule


@pytest.mark.parametrize("plan", [Schedule(1, 3), Schedule(2, 5), Schedule(4, 4), Schedule(2, 4, 2), Schedule(3, 6, 4)])
def test_every_chunk_of_a_microbatch_runs_once_right_after_the_previous(plan):
    ran = {}
    for tick in range(plan.ticks):
        for stage in range(plan.stages):
            work = plan.work(tick, stage)
            if work.valid:
                key = int(work.microbatch), int(work.round) * plan.stages + stage
                assert key not in ran, "twice"
                ran[key] = tick
    chunks = plan.stages * plan.rounds
    assert set(ran) == {(m, c) for m in range(plan.microbatches) for c in range(chunks)}
    for (m, c), tick in ran.items():
        # The next stage receives an output one tick later and must use it then.
        assert c == 0 or ran[m, c - 1] == tick - 1, (m, c)


def test_more_rounds_idle_less():
    assert Schedule(4, 8).bubble == pytest.approx(3 / 11)
    assert Schedule(4, 8, 2).bubble == pytest.approx(3 / 19)
