"""`axlearn runs`: a table of the runs of a folder, and what differs between two."""

import json
import os

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli


def make(folder, *, lr, steps, loss, written=1_000_000):
    folder.mkdir(parents=True)
    config = (
        f"resolved: true\ntype: trainer\nmax_steps: 40\nlearner:\n  optimizer: {{type: adamw, learning_rate: {lr}}}\n"
    )
    (folder / "config.yaml").write_text(config)
    (folder / "run.lock.json").write_text(json.dumps({"experiment": "toy", "parameters": 7}))
    rows = [{"step": s, "loss": loss + steps - s, "elapsed_seconds": 60.0 * s} for s in range(1, steps + 1)]
    rows.append({"step": steps, "eval_loss": loss + 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for file in folder.iterdir():
        os.utime(file, (written, written))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs/old", lr=0.1, steps=3, loss=2.5)
    make(tmp_path / "runs/new", lr=0.2, steps=5, loss=1.5, written=2_000_000)
    (tmp_path / "runs/notes").mkdir()
    return tmp_path / "runs"


def axlearn(*words, code=0):
    result = CliRunner().invoke(cli, ["runs", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_the_newest_is_first_with_its_last_metrics(runs):
    new, old = json.loads(axlearn("--json"))
    assert (new["name"], old["name"]) == ("new", "old")
    assert (new["step"], new["of"], new["loss"], new["evaluation"]) == (5, "40", "1.5", "eval_loss 2.5")
    assert (old["step"], old["loss"], old["minutes"]) == (3, "2.5", "3.0")
    table = axlearn().splitlines()
    assert table[0].split()[:4] == ["NAME", "STEP", "OF", "LOSS"]
    assert table[1].startswith("new ")


def test_two_are_compared_by_what_differs(runs):
    rows = {r["name"]: (r["first"], r["second"]) for r in json.loads(axlearn(runs / "old", runs / "new", "--json"))}
    assert rows == {
        "config: learner.optimizer.learning_rate": ("0.1", "0.2"),
        "last: step": ("3", "5"),
        "last: loss": ("2.5", "1.5"),
        "last: eval_loss": ("3.5", "2.5"),
    }


def test_equal_runs_say_so(runs):
    result = CliRunner().invoke(cli, ["runs", str(runs / "old"), str(runs / "old")])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "the runs are identical" in result.stderr


def test_a_run_that_cannot_be_read_is_marked_and_the_others_are_listed(runs):
    (runs / "old/config.yaml").write_text("{")
    rows = {r["name"]: r for r in json.loads(axlearn("--json"))}
    assert rows["new"]["loss"] == "1.5"
    assert rows["old"]["problem"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is not a directory"),
        (["a", "b", "c"], "expected: a folder of runs, or two runs to compare"),
        (["runs/notes", "runs/old"], "runs/notes"),
    ],
)
def test_what_is_no_run(runs, words, says):
    assert says in axlearn(*words, code=2)


def test_a_folder_without_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    result = CliRunner().invoke(cli, ["runs"])
    assert result.exit_code == 0
    assert "there are no runs" in result.stderr


@pytest.mark.parametrize("lock", [{"made_from": "runs/base", "step": 7}, {"imported_from": "models/base"}])
def test_a_run_that_was_not_trained_has_a_source_and_no_problem(lock, runs):
    derived = runs / "derived"
    (derived / "checkpoints/7").mkdir(parents=True)
    (derived / "config.yaml").write_text("resolved: true\ntype: trainer\nmax_steps: 40\n")
    (derived / "run.lock.json").write_text(json.dumps(lock))
    rows = {row["name"]: row for row in json.loads(axlearn("--json"))}
    assert rows["derived"]["problem"] == ""
    assert rows["derived"]["from"] == lock.get("made_from", lock.get("imported_from"))
    assert rows["new"]["from"] == ""
    (derived / "run.lock.json").write_text("{}")
    rows = {row["name"]: row for row in json.loads(axlearn("--json"))}
    assert "metrics.jsonl is missing" in rows["derived"]["problem"]
