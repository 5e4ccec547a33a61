"""`axlearn train --dry-run`: says what would run, and touches nothing."""

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli

SMALL = ["--set", "model.decoder.num_layers=1", "--set", "model.decoder.hidden_dim=32", "--set", "evaluators={}"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry(*words, code=0):
    result = CliRunner().invoke(cli, ["train", "quickstart", "--dry-run", *SMALL, *words])
    assert result.exit_code == code, result.output
    if code:
        return result.stderr
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines())


def test_it_says_what_would_run_and_writes_nothing(folder):
    facts = dry("--steps", "7", "--run-dir", "run", "--with", "rope:theta=5000", "--set", "checkpointer.every_steps=3")
    assert facts["experiment"] == "quickstart"
    assert facts["features"] == "rope"
    assert facts["steps"] == "from step 0 to 7"
    assert facts["checkpoints"].startswith("every 3 steps and at the end, in ")
    assert int(facts["parameters"].replace(",", "")) > 2048 * 32
    assert "GiB on each device" in facts["state"]
    assert "tokens [8, 256]" in facts["batch"]
    assert facts["run"].endswith("run")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_there_is_continued(folder):
    words = ["train", "quickstart", *SMALL, "--set", "input.sequence_length=16", "--set", "input.batch_size=8"]
    assert CliRunner().invoke(cli, [*words, "--run-dir", "run", "--steps", "2"]).exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    more = ("--set", "input.sequence_length=16", "--set", "input.batch_size=8", "--run-dir", "run")
    assert dry(*more, "--steps", "5")["steps"] == "from step 2, its newest checkpoint, to 5"
    assert dry(*more, "--steps", "5", "--restart")["steps"] == "from step 0 to 5"
    assert "model.decoder.num_layers" in dry(*more, "--set", "model.decoder.num_layers=2", code=2)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_what_train_refuses_is_refused(folder):
    assert "no 'num_layer'" in dry("--set", "model.decoder.num_layer=2", code=2)
    (folder / "other").mkdir()
    (folder / "other/file").write_text("mine")
    assert "other" in dry("--run-dir", "other", code=2)
    assert [p.name for p in folder.rglob("*")] == ["other", "file"]
