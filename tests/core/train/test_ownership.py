"""Checkpoints that belong to a run."""

import json

import pytest

import axlearn_core as ax
from axlearn_core.checkpoint import LocalStorage, manifest
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.learn import AdamW
from support import api_runs

SETTINGS = {
    **api_runs.SMALL,
    "checkpointer.every_steps": 2,
    "log_every_steps": 1,
}
OPTIMIZER = AdamW(learning_rate=0.01)


def train(run, *, steps=4, settings=(), **more):
    return ax.train(
        "quickstart",
        set={**SETTINGS, "learner.optimizer": OPTIMIZER, **dict(settings)},
        steps=steps,
        run_dir=run,
        **more,
    )


@pytest.mark.slow
def test_a_name_that_is_not_utf8_is_refused_and_others_work(tmp_path):
    with pytest.raises(RequestError, match=r"the scheme 'nfs' is unknown"):
        train("nfs://bucket/run")
    with pytest.raises(RequestError, match="not valid UTF-8"):
        train(f"{tmp_path}/run\udcff")
    result = train(tmp_path / "a [1]*?", steps=3)
    assert manifest.steps(result.run_dir / "checkpoints") == [2, 3]
    assert train(tmp_path / "a [1]*?", steps=4).step == 4


@pytest.mark.slow
def test_checkpoints_carry_the_run_and_outlive_its_directory(tmp_path):
    place = tmp_path / "checkpoints"
    settings = {"checkpointer.uri": str(place)}
    train(tmp_path / "one", settings=settings)
    run = json.loads((tmp_path / "one/run.lock.json").read_text())["run"]
    assert {manifest.inspect(place, s).run for s in manifest.steps(place)} == {run}
    assert not list(place.glob(".trainer*"))
    # The directory is lost: the same config goes on, as the same run.
    assert train(tmp_path / "two", steps=6, settings=settings).step == 6
    assert json.loads((tmp_path / "two/run.lock.json").read_text())["run"] == run
    # Another config is refused before anything is written, with what differs.
    with pytest.raises(CheckpointError, match=r"has checkpoints of a run with a different config[^$]*seed: 0 -> 1"):
        train(tmp_path / "three", settings={**settings, "seed": 1})
    assert not (tmp_path / "three").exists()
    # So is a run with an id of its own.
    train(tmp_path / "four")
    with pytest.raises(
        CheckpointError, match=rf"checkpoints from a different run\n    got: run {run}\n    expected: run "
    ):
        train(tmp_path / "four", steps=6, settings=settings)


@pytest.mark.slow
def test_metrics_without_a_checkpoint_are_asked_about(tmp_path):
    run = tmp_path / "run"
    train(run)
    before = (run / "metrics.jsonl").read_text()
    for step in manifest.steps(run / "checkpoints"):
        LocalStorage(run / "checkpoints").delete(str(step))
    with pytest.raises(CheckpointError, match=r"metrics up to step 4, but no checkpoint[^$]*--restart"):
        train(run)
    assert (run / "metrics.jsonl").read_text() == before
    assert train(run, restart=True).step == 4
    assert [p.read_text() for p in run.glob("metrics.superseded-*.jsonl")] == [before]


@pytest.mark.slow
def test_restart_sets_checkpoints_aside(tmp_path):
    run = tmp_path / "run"
    train(run)
    assert train(run, steps=2, restart=True).step == 2
    assert manifest.steps(run / "checkpoints") == [2]
    assert sorted(p.name.partition("-")[0] for p in (run / "checkpoints").glob("*.superseded-*")) == [
        "2.superseded",
        "4.superseded",
    ]
