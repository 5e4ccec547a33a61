"""kill -9 by a plan, during local saves too: the run goes on from its local states, and the losses are those of no kill."""

import pytest

from axlearn_testing.chaos import Chaos, Target
from support import cli_runs


@pytest.mark.slow
def test_kills_lose_at_most_the_steps_since_the_local_state(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = ("checkpointer.every_steps=40",)
    tier = ("--with", f"local-tier:every=2,directory={tmp_path}/local")
    cli_runs.axlearn(*cli_runs.arguments(whole, steps=90, settings=settings))
    plan = Chaos(seed=5).plan(kinds=("kill",), steps=(5, 80), count=8)
    print(plan)
    resumed = []
    for fault in plan.faults:
        process = cli_runs.start(*cli_runs.arguments(run, steps=90, settings=settings, more=tier))
        target = Target(processes={0: process.pid}, step=lambda: max(cli_runs.logged(run), default=0))
        at = max(target.step() + 1, fault.step)
        fault_now = type(fault)(fault.kind, at, 0)
        list(type(plan)(plan.seed, (fault_now,)).play(target, seconds=200))
        reached = target.step()
        _, err = process.communicate()
        assert process.returncode == -9, err[-2000:]
        place = sorted(int(p.name) for p in tmp_path.glob("local/*/process-0/[0-9]*"))
        newest = max([*place, *(int(p.name) for p in run.glob("checkpoints/[0-9]*"))], default=0)
        resumed.append(reached - newest)
    cli_runs.axlearn(*cli_runs.arguments(run, steps=90, settings=settings, more=tier))
    assert cli_runs.losses(run) == cli_runs.losses(whole)
    assert max(resumed) <= 8, (
        resumed
    )  # two steps between states, one state under way, and lines that are written behind
    half = [p for p in tmp_path.glob("local/*/process-0/.*") if "damaged" not in p.name]
    assert half == []
