"""One trainer for each run directory, and checkpoints that belong to a run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import axlearn_core as ax
from axlearn_core.checkpoint import LocalStorage, manifest
from axlearn_core.errors import CheckpointError, RequestError, WorkError
from axlearn_core.learn import AdamW
from axlearn_core.run import holder
from axlearn_core.run.holder import Holder

SETTINGS = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 16,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 16,
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
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


def test_a_second_trainer_is_refused_with_who_is_there(tmp_path):
    first = Holder(LocalStorage(tmp_path), "the run", "id")
    with pytest.raises(CheckpointError, match=rf"is in use by another trainer: process {os.getpid()} on ") as error:
        train(tmp_path)
    assert error.value.exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == [".trainer-1.json"]
    first.release()
    assert not tmp_path.exists()  # it had written nothing else
    Holder(LocalStorage(tmp_path), "the run", "id").release()


def test_a_holder_that_was_killed_gives_way_at_once(tmp_path):
    code = (
        "import sys, time; from axlearn_core.checkpoint import LocalStorage; from axlearn_core.run.holder import Holder;"
        "Holder(LocalStorage(sys.argv[1]), 'run', 'id'); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {process.pid} on "):
            Holder(LocalStorage(tmp_path), "run", "id")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CheckpointError):  # frozen is not dead
            Holder(LocalStorage(tmp_path), "run", "id")
        process.send_signal(signal.SIGKILL)
        process.wait()
    second = Holder(LocalStorage(tmp_path), "run", "id")
    assert [p.name for p in tmp_path.iterdir()] == [".trainer-2.json"]
    second.release()


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(holder, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(holder, "STALE_SECONDS", 0.3)


def elsewhere(directory, *, age):
    """The file of a trainer on another machine."""
    info = {
        "run": "id",
        "host": "far",
        "machine": "other",
        "pid": 7,
        "started": "1",
        "since": 0.0,
        "beat": time.time() - age,
    }
    (directory / ".trainer-1.json").write_text(json.dumps(info))


def test_a_holder_on_another_machine_is_judged_by_its_beats(tmp_path, fast, monkeypatch):
    elsewhere(tmp_path, age=0.0)
    with pytest.raises(CheckpointError, match="process 7 on far, since 19"):
        Holder(LocalStorage(tmp_path), "run", "id")
    elsewhere(tmp_path, age=3600.0)  # its clock is an hour behind

    def wait(seconds):  # it beats on
        elsewhere(tmp_path, age=3600.0 - seconds)

    with monkeypatch.context() as patch:
        patch.setattr(holder, "time", SimpleNamespace(**vars(time) | {"sleep": wait}))
        with pytest.raises(CheckpointError, match="process 7 on far"):
            Holder(LocalStorage(tmp_path), "run", "id")
    Holder(LocalStorage(tmp_path), "run", "id").release()  # it beats no more


def test_one_of_many_takes_over(tmp_path, fast):
    elsewhere(tmp_path, age=3600.0)
    winners, refused = [], []

    def attempt():
        try:
            winners.append(Holder(LocalStorage(tmp_path), "run", "id"))
        except CheckpointError as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) <= 1
    assert len(winners) + len(refused) == 8
    for one in winners:
        one.release()


def test_a_holder_that_was_taken_for_dead_hears_of_it(tmp_path, fast):
    first = Holder(LocalStorage(tmp_path), "run", "id")
    first.check()
    LocalStorage(tmp_path).create(".trainer-2.json", json.dumps({"pid": 9, "host": "far", "since": 0.0}).encode())
    first._thread.join(timeout=10)
    with pytest.raises(WorkError, match=r"another trainer took run[^$]*process 9 on far"):
        first.check()
    first.release()


def test_what_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot train in"):
        Holder(LocalStorage(tmp_path / "file" / "run"), "run", "id")


def test_a_name_that_is_not_utf8_is_refused_and_others_work(tmp_path):
    with pytest.raises(RequestError, match=r"the scheme 'nfs' is unknown"):
        train("nfs://bucket/run")
    with pytest.raises(RequestError, match="not UTF-8"):
        train(f"{tmp_path}/run\udcff")
    result = train(tmp_path / "a [1]*?", steps=3)
    assert manifest.steps(result.run_dir / "checkpoints") == [2, 3]
    assert train(tmp_path / "a [1]*?", steps=4).step == 4


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
    with pytest.raises(CheckpointError, match=r"has checkpoints of a run with another config[^$]*seed: 0 -> 1"):
        train(tmp_path / "three", settings={**settings, "seed": 1})
    assert not (tmp_path / "three").exists()
    # So is a run with an id of its own.
    train(tmp_path / "four")
    with pytest.raises(CheckpointError, match=rf"checkpoints of another run\n    got: run {run}\n    expected: run "):
        train(tmp_path / "four", steps=6, settings=settings)


def test_metrics_without_a_checkpoint_are_asked_about(tmp_path):
    run = tmp_path / "run"
    train(run)
    before = (run / "metrics.jsonl").read_text()
    for step in manifest.steps(run / "checkpoints"):
        LocalStorage(run / "checkpoints").delete(str(step))
    with pytest.raises(CheckpointError, match=r"metrics up to step 4, and no checkpoint[^$]*--restart"):
        train(run)
    assert (run / "metrics.jsonl").read_text() == before
    assert train(run, restart=True).step == 4
    assert [p.read_text() for p in run.glob("metrics.superseded-*.jsonl")] == [before]


def test_restart_sets_checkpoints_aside(tmp_path):
    run = tmp_path / "run"
    train(run)
    assert train(run, steps=2, restart=True).step == 2
    assert manifest.steps(run / "checkpoints") == [2]
    assert sorted(p.name.partition("-")[0] for p in (run / "checkpoints").glob("*.superseded-*")) == [
        "2.superseded",
        "4.superseded",
    ]
