"""Runs on rollouts from the command line: what they log and write. `tests/hostile/test_kills.py` kills such runs."""

import pytest

from axlearn_plugins_rl.rollout_records import read_rollouts
from support import cli_runs, rollout_runs

STEPS = 8
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[0, 1], ids=["ahead-0", "ahead-1"])
def whole(request, tmp_path_factory):
    """A run, and how far its rollouts run ahead."""
    folder = tmp_path_factory.mktemp("rollouts")
    task, run = rollout_runs.write_sums(folder), folder / "whole"
    cli_runs.axlearn(*rollout_runs.arguments(run, task, steps=STEPS, ahead=request.param), fresh=True)
    return run, request.param


def test_a_run_logs_its_rollouts_and_writes_them(whole):
    run, ahead = whole
    rows = [row for row in cli_runs.metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["rollout_age"] for row in rows] == [0, *[ahead] * (STEPS - 1)]
    assert {"reward", "answer_length", "dead_groups", "reward_errors", "rollout_seconds", "entropy"} <= rows[0].keys()
    if not ahead:
        assert [row["train_rollout_difference"] for row in rows] == [0.0] * STEPS
    files = sorted((run / "rollouts").glob("*.jsonl"))
    assert len(files) == STEPS
    groups = read_rollouts(run / "rollouts" / "step-3.jsonl")
    scores = [score.value for group in groups for score in group.scores]
    assert len(scores) == 16
    assert sum(scores) / len(scores) == rows[2]["reward"]
    versions = {s.version for g in groups for r in g.rollouts for t in r.trajectories for s in t if s.drawn}
    assert versions == {2 - ahead}
