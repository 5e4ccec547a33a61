"""`Run` at places that are not runs, or are damaged: what each part says."""

import pytest

from axlearn_core.errors import CheckpointError
from axlearn_core.run import Run
from axlearn_core.run.checkpoints import find_step


def test_a_place_that_is_not_a_run(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, reason in (("file", "is a file"), ("empty", "has no config.yaml"), ("missing", "does not exist")):
        run = Run(tmp_path / name)
        assert (run.settings, run.lock, [*run.metrics], run.config) == ({}, {}, [], None)
        for ask in (lambda run=run: run.checkpoints, lambda run=run: run.weights()):
            with pytest.raises(CheckpointError, match=f"{name} is not a run directory: it {reason}"):
                ask()


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [1\n", "\x00"])
def test_a_damaged_config_is_not_taken_for_a_missing_one(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    run = Run(tmp_path)
    for ask in (lambda: run.settings, lambda: run.checkpoints, lambda: run.config, run.weights):
        with pytest.raises(CheckpointError, match=r"config\.yaml"):
            ask()
    assert run.lock == {}


def test_a_run_without_checkpoints_offers_none():
    with pytest.raises(CheckpointError) as caught:
        find_step("runs/new", [], 3)
    assert str(caught.value).startswith("runs/new has no checkpoint\n    fix: train the run until it saves one")
