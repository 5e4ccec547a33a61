"""Runs on rollouts in jobs of two processes."""

import json
import shutil

import pytest

from axlearn_plugins_rl.rollout_records import read_rollouts
from support import cli_runs, rollout_runs
from support.cli_jobs import finish, start, together
from support.rollout_kills import CODE

STEPS = 4
pytestmark = pytest.mark.slow
EVALUATES = "evaluators={eval: {type: reward-evaluator, every_steps: 2, max_examples: 5, samples: 2, pass_at: [1, 2]}}"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return rollout_runs.write_sums(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """A run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    cli_runs.axlearn(*rollout_runs.arguments(run, task, steps=STEPS, settings=(EVALUATES,)), fresh=True)
    return run


@pytest.fixture(scope="module")
def pair(task, alone, tmp_path_factory):
    """A run of one process, and a job of two processes with the same config."""
    shared = tmp_path_factory.mktemp("shared") / "run"
    together(rollout_runs.arguments(shared, task, steps=STEPS, settings=(EVALUATES,)))
    return alone, shared


def test_two_processes_train_as_one(pair):
    alone, shared = map(rollout_runs.curves, pair)
    assert [row["step"] for row in shared] == [row["step"] for row in alone]
    for row, expected in zip(shared, alone, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (row["step"], name)


def test_the_files_of_both_processes_have_the_rollouts_of_one(pair):
    alone, shared = pair
    names = {path.name for path in (shared / "rollouts").iterdir()}
    assert names == {f"step-{n}{part}.jsonl" for n in range(1, STEPS + 1) for part in ("", ".process-1")}
    for step in range(1, STEPS + 1):
        groups, expected = (read_rollouts(run / "rollouts" / f"step-{step}.jsonl") for run in (shared, alone))
        assert [[(g.example.id, r.seed, r.text) for r in g.rollouts] for g in groups] == [
            [(g.example.id, r.seed, r.text) for r in g.rollouts] for g in expected
        ]


def test_the_report_and_the_scores_have_the_rollouts_of_both(pair, task):
    _, shared = pair
    file = str(shared / "rollouts" / f"step-{STEPS}.jsonl")
    components = task.strip("{}").replace("type: jsonl-task, ", "jsonl-task:").replace(": ", "=").replace(", ", ",")
    scored = cli_runs.axlearn("rl", "score", components, file, "--json")
    values = {row["name"]: row["value"] for row in json.loads(scored.stdout)}
    assert (values["examples"], values["rollouts"]) == (4, 16)
    cli_runs.axlearn("report", str(shared))
    page = (shared / "report.html").read_text()
    examples = {group.example.id for group in read_rollouts(file)}
    assert sum(f"example {i} · step {STEPS}" in page for i in examples) == 3


@pytest.fixture(scope="module")
def killed(task, tmp_path_factory):
    """A job whose rollouts run ahead, and the same job after `kill -9`."""
    folder = tmp_path_factory.mktemp("killed")
    whole, run = folder / "whole", folder / "run"
    together(rollout_runs.arguments(whole, task, steps=STEPS, ahead=1))
    processes = start(rollout_runs.arguments(run, task, steps=STEPS, ahead=1))
    assert cli_runs.kill_when(processes[1], (run / "checkpoints" / "2").exists)
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    return whole, run


def test_a_killed_job_resumes_to_the_last_bit(task, killed, tmp_path):
    whole, run = killed[0], shutil.copytree(killed[1], tmp_path / "run")
    together(rollout_runs.arguments(run, task, steps=STEPS, ahead=1))
    rows, expected = ({row["step"]: row for row in rollout_runs.curves(r)} for r in (run, whole))
    assert rows == expected
    assert rollout_runs.rollouts(run) == rollout_runs.rollouts(whole)
    assert cli_runs.stored_state(run) == cli_runs.stored_state(whole)


def test_one_process_continues_a_job_of_two(task, killed, tmp_path):
    whole, run = killed[0], shutil.copytree(killed[1], tmp_path / "run")
    continued = cli_runs.axlearn(*rollout_runs.arguments(run, task, steps=STEPS, ahead=1), fresh=True)
    assert "note: the number of processes changed from 2 to 1" in continued.stderr
    rows, expected = ({row["step"]: row for row in rollout_runs.curves(r)} for r in (run, whole))
    assert rows.keys() == expected.keys()
    for step, row in rows.items():
        assert row["reward"] == expected[step]["reward"]
        assert row["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5, abs=1e-5)


def test_dead_groups_are_replaced_by_the_examples_of_one_process(task, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    options = {"steps": 2, "settings": ("loop.dead_groups=resample", "loop.resample_rounds=8", "loop.buffer.ahead=1")}
    cli_runs.axlearn(*rollout_runs.arguments(alone, task, **options), fresh=True)
    together(rollout_runs.arguments(shared, task, **options))
    for step, (row, expected) in enumerate(zip(*map(rollout_runs.curves, (shared, alone)), strict=True), 1):
        assert row["resampled_groups"] == expected["resampled_groups"] > 0
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        ids = [{g.example.id for g in read_rollouts(r / "rollouts" / f"step-{step}.jsonl")} for r in (shared, alone)]
        assert ids[0] == ids[1]


def test_processes_with_two_devices_train_as_one_device(task, alone, tmp_path):
    run = tmp_path / "run"
    settings = ("mesh.shape={data: 2, fsdp: 2}", EVALUATES, "loop.policy.engine.runner.mode=fast")
    together(rollout_runs.arguments(run, task, steps=1, settings=settings), devices=2)
    row, expected = (rollout_runs.curves(r)[0] for r in (run, alone))
    assert row["reward"] == expected["reward"]
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)


PARTS = {
    "critic": {"method": "ppo", "options": "critic=policy,critic_learning_rate=0.001"},
    "router-replay": {
        "features": ("moe:num_experts=4,top_k=2", "router-replay"),
        "settings": ("input.experts=[2, 2]",),  # layers, experts per token
    },
    "sampling-mask": {"features": ("sampling-mask:top_k=20,top_p=0.95",)},
}


@pytest.mark.parametrize("name", PARTS)
def test_two_processes_train_as_one_with_other_parts(task, tmp_path, name):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    cli_runs.axlearn(*rollout_runs.arguments(alone, task, steps=2, **PARTS[name]), fresh=True)
    together(rollout_runs.arguments(shared, task, steps=2, **PARTS[name]))
    rows = [rollout_runs.curves(run) for run in (shared, alone)]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    assert len(rows[0]) == 2
    for row, expected in zip(*rows, strict=True):
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=1e-5, abs=1e-5), (row["step"], key)


@pytest.mark.parametrize(
    "options", [(), ("--set", "loop.dead_groups=resample", "--ahead", "1")], ids=["keep", "resample"]
)
def test_a_reward_that_fails_in_one_process_ends_the_job(tmp_path, options):
    words = (str(tmp_path / "run"), "--steps", "6", "--breaks", "1,9", *options)
    first, second = finish(start(words, program=("-c", CODE)), 1)
    assert "failed on process 1: ValueError: the reward is broken" in first
    assert "ValueError: the reward is broken" in second
    steps = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(steps) == cli_runs.logged(tmp_path / "run")[-1]
