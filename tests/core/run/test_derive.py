"""Runs that are made of runs, and trained further."""

import pytest

import axlearn_core as ax
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import Run
from axlearn_core.run.derive import new_directory
from axlearn_core.run.record import lock_drift
from support import api_runs


@pytest.mark.slow
def test_a_derived_run_keeps_its_origin_after_more_training(tmp_path, capfd):
    ax.train("quickstart", set=api_runs.SMALL, steps=1, run_dir=tmp_path / "base")
    base = Run(tmp_path / "base")
    base.derive(tmp_path / "made", base.config, lambda weights: weights.read(), lock={"note": "as it was"})
    origin = {"made_from": str(tmp_path / "base"), "step": 1, "note": "as it was"}
    assert Run(tmp_path / "made").lock == origin
    capfd.readouterr()
    rate = {"learner.optimizer.learning_rate.peak": 0.001}  # nothing was trained with another rate
    ax.train(base.config, set=rate, steps=2, run_dir=tmp_path / "made")
    assert "was not installed" not in capfd.readouterr().err
    with pytest.raises(CheckpointError, match=r"learning_rate\.peak"):
        ax.train(base.config, steps=2, run_dir=tmp_path / "made")
    lock = Run(tmp_path / "made").lock
    assert origin.items() <= lock.items()
    assert lock["versions"].keys() >= {"axlearn-core", "jax"}
    assert lock["trained_parameters"] == lock["parameters"] > 0
    ax.train(base.config, set=rate, steps=1, run_dir=tmp_path / "made", restart=True)
    assert "made_from" not in Run(tmp_path / "made").lock, "its weights are new"


def test_versions_are_compared_if_both_locks_have_them():
    assert lock_drift({"versions": {"jax": "1"}}, {"versions": {"jax": "2", "flax": "3"}}) == [
        "flax was not installed, is 3",
        "jax was 1, is 2",
    ]
    assert (
        lock_drift({"made_from": "base"}, {"versions": {"jax": "2"}, "flags": {}, "python": "3", "devices": "1"}) == []
    )


@pytest.mark.parametrize(
    ("name", "got", "fix"),
    [
        ("x", "x", "use a"),
        (".run.12.partial", r"\.run\.12\.partial", "delete the files of a killed process"),
        (None, "a file", "use a"),
    ],
)
def test_a_directory_that_is_not_empty_is_refused_with_what_is_there(tmp_path, name, got, fix):
    out = tmp_path / "run"
    assert new_directory(out) == out
    if name:
        out.mkdir()
        assert new_directory(out) == out
    (out / name if name else out).write_text("")
    with pytest.raises(RequestError, match=f"run already exists\n    got: {got}\n    fix: {fix}"):
        new_directory(out)
