"""Edited run directories: the hashed copy in the checkpoint decides."""

import re

import pytest

from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import open_weights
from axlearn_core.run.record import RunDir
from support import cli_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("edited") / "run"
    cli_runs.axlearn(*cli_runs.arguments(run, steps=3))
    return run


@pytest.fixture
def run(trained, tmp_path):
    import shutil

    return shutil.copytree(trained, tmp_path / "run")


def edit(file, pattern, new):
    text, count = re.subn(pattern, new, file.read_text(), count=1)
    assert count == 1
    file.write_text(text)


def test_the_model_that_was_trained_is_loaded(run, caplog):
    before = open_weights(run).config
    edit(run / "config.yaml", r"eps: 1e-0?[56]", "eps: 0.5")
    assert open_weights(run).config == before
    assert "eps: " in caplog.text
    assert "using the value in the checkpoint" in caplog.text
    result = cli_runs.axlearn("generate", str(run), "--prompt", "def ", "--max-tokens", "4", fresh=True)
    assert "differs from the config that step 3 was trained with" in result.stderr


def test_an_edited_config_does_not_agree_with_an_edited_request(run):
    edit(run / "config.yaml", r"eps: 1e-0?[56]", "eps: 0.5")
    wrong = cli_runs.arguments(run, steps=6, settings=("model.**.eps=0.5",))
    result = cli_runs.axlearn(*wrong, code=2)
    assert "contains a run with a different config; nothing was written" in result.stderr
    assert "eps" in result.stderr
    cli_runs.axlearn(*cli_runs.arguments(run, steps=4))


def test_an_edited_copy_in_the_checkpoint_is_damage(run):
    edit(run / "checkpoints/3/config.yaml", r"eps: 1e-0?[56]", "eps: 0.5")
    with pytest.raises(CheckpointError, match=r"config\.yaml: its hash does not match"):
        open_weights(run)
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=6), code=2)
    assert "config.yaml: got " in result.stderr


LOCKS = {
    "null": "null",
    "list": "[1, 2]",
    "text": '"abc"',
    "number": "7",
    "torn": '{"versions": {"jax',
    "types": '{"versions": 3, "flags": [], "data": "x", "run": [1], "saved": "no", "hash": {}}',
    "deep": "[" * 100_000,
    "binary": "\x00\x01",
}


@pytest.mark.parametrize("name", LOCKS)
def test_an_invalid_lock_is_one_error(name, run):
    (run / "run.lock.json").write_text(LOCKS[name])
    with pytest.raises(RequestError, match=r"run\.lock\.json"):
        RunDir(run, resumes=True).read_lock()
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=4), code=2)
    assert "run.lock.json" in result.stderr
    assert "Traceback" not in result.stderr
    (run / "run.lock.json").unlink()
    cli_runs.axlearn(*cli_runs.arguments(run, steps=4))


METRICS = {
    "types": '{"step": 1, "loss": "x", "elapsed_seconds": [1]}\n',
    "step": '{"step": "three", "loss": 1}\n',
    "null": "null\n",
    "deep": '{"step": ' + "[" * 100_000 + "\n",
    "huge": '{"step": 1, "loss": 1e999, "elapsed_seconds": 1e999}\n',
    "binary": "\x00\xff\n",
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_wrong_types_stop_nothing(name, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(METRICS[name])
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=4))
    assert "Traceback" not in result.stderr
    cli_runs.axlearn("report", str(run))
