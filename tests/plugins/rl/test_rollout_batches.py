"""The order of rollouts and steps, and what a checkpoint contains after each step."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from axlearn_plugins_rl.rollout_batches import BatchFacts, RolloutBatches
from axlearn_plugins_rl.rollout_buffer import RolloutBuffer
from axlearn_plugins_rl.rollout_worker import RolloutWorker
from support.rollout_groups import ConstantPolicy, group

STEPS = 6


class Run:
    """A run whose state is its step, and whose rollouts record the weights and the examples that they use."""

    def __init__(self, ahead, *, saved=None, fails=None):
        self.session = SimpleNamespace(step=0, max_steps=STEPS, state=0, host_scalars={}, start_phase=lambda name: None)
        self.policy = ConstantPolicy()
        self.policy.engine = SimpleNamespace(close=lambda: None)
        self.worker = RolloutWorker(self.policy, None, None, None)
        self.buffer = RolloutBuffer.Config(ahead=ahead).build()
        self.trained, self.fails = [], fails
        position = 0
        if saved:
            self.session.step = self.session.state = saved["step"]
            position = saved["data"]["position"]
            self.buffer.set_state(saved["buffer"])
        self.batches = RolloutBatches(
            self.session,
            worker=self.worker,
            buffer=self.buffer,
            roll_out=self.roll_out,
            weights=lambda state: state,
            build_rows=lambda number, groups, batch: {"groups": groups},
            position=position,
        )
        if saved:
            self.batches.facts = {n: BatchFacts(**f) for n, f in saved["facts"].items()}

    async def roll_out(self, weights, version, cursor):
        await asyncio.sleep(0.001)
        if self.fails == version:
            raise ValueError("the reward is broken")
        start = cursor.position
        cursor.position += 2
        groups = [group(number=start, version=weights), group(number=start + 1, version=weights)]
        return groups, BatchFacts(version=version, end=cursor.position, scalars={"reward": float(start)})

    def take_step(self):
        groups = next(self.batches)["groups"]
        version = {s.version for g in groups for r in g.rollouts for s in r.trajectories[0] if s.drawn}
        self.trained.append((self.session.step, version.pop(), [g.example.id for g in groups]))
        self.session.step += 1
        self.session.state += 1

    def save(self):
        data = self.batches.get_state()
        facts = {n: {"version": f.version, "end": f.end, "scalars": f.scalars} for n, f in self.batches.facts.items()}
        return {"step": self.session.step, "data": data, "buffer": self.buffer.get_state(), "facts": facts}

    def finish(self):
        while self.session.step < STEPS:
            self.take_step()
        self.worker.close()
        return self.trained


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_each_batch_has_the_age_that_the_buffer_allows(ahead):
    expected = [(n, max(0, n - ahead), [str(2 * n), str(2 * n + 1)]) for n in range(STEPS)]
    assert Run(ahead).finish() == expected


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_that_resumes_after_any_step_trains_on_the_same_batches(ahead, step):
    first = Run(ahead)
    for _ in range(step):
        first.take_step()
    saved = first.save()
    assert [int(n) for n in saved["buffer"]] == [*range(step, min(step + ahead, STEPS))]
    resumed = Run(ahead, saved=saved)
    assert first.trained + resumed.finish() == Run(ahead).finish() == first.finish()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_of_the_present_weights_is_dropped_from_a_checkpoint(ahead):
    """A signal can end the wait for a batch. The step has not used it, and the next attempt draws it again."""
    first = Run(ahead)
    first.take_step()
    next(first.batches)  # the signal arrives now
    saved = first.save()
    resumed = Run(ahead, saved=saved)
    assert first.trained + resumed.finish() == Run(ahead).finish()
    first.worker.close()


def test_a_failed_batch_is_raised_and_left_out_of_the_checkpoint():
    run = Run(1, fails=1)  # the weights of version 1 draw batch 2
    run.take_step()
    run.take_step()
    with pytest.raises(ValueError, match="broken"):
        run.take_step()
    saved = run.save()
    assert saved["step"] == 2
    assert (saved["data"], [*saved["buffer"]]) == ({"position": 4}, [])
    resumed = Run(1, saved=saved)
    assert [(n, ids) for n, _, ids in run.trained + resumed.finish()] == [(n, ids) for n, _, ids in Run(1).finish()]
    run.worker.close()


def test_the_scalars_of_a_batch_belong_to_its_step():
    run = Run(1)
    for step in range(3):
        run.take_step()
        scalars = run.session.host_scalars
        assert scalars["reward"] == 2.0 * step
        assert scalars["rollout_age"] == float(min(step, 1))
        assert scalars["rollout_wait"] >= 0
    assert run.batches.describe_position() == "4; 5"
    run.worker.close()


def test_rows_are_arrays_of_the_groups():
    run = Run(0)
    assert np.asarray(next(run.batches)["groups"]).shape == (2,)
    run.worker.close()
