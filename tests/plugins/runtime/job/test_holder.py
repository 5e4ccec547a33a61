"""One trainer for each run directory."""

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
from axlearn_core.checkpoint import LocalStorage
from axlearn_core.errors import CheckpointError, RequestError, WorkError
from axlearn_plugins_runtime.job import holder
from axlearn_plugins_runtime.job.holder import Holder
from support import api_runs

SETTINGS = {
    **api_runs.SMALL,
    "checkpointer.every_steps": 2,
    "log_every_steps": 1,
}


def test_a_second_trainer_is_refused_with_who_is_there(tmp_path):
    first = Holder(LocalStorage(tmp_path), "the run", "id")
    with pytest.raises(CheckpointError, match=rf"is in use by another trainer: process {os.getpid()} on ") as error:
        ax.train("quickstart", set=SETTINGS, steps=4, run_dir=tmp_path)
    assert error.value.exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == [".trainer-1.json"]
    first.release()
    assert not tmp_path.exists()  # it had written nothing else
    Holder(LocalStorage(tmp_path), "the run", "id").release()


@pytest.mark.slow
def test_a_holder_that_was_killed_gives_way_at_once(tmp_path):
    code = (
        "import sys, time; from axlearn_core.checkpoint import LocalStorage\n"
        "from axlearn_plugins_runtime.job.holder import Holder\n"
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
    with pytest.raises(WorkError, match=r"another trainer took over run[^$]*process 9 on far"):
        first.check()
    first.release()


def test_what_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot train in"):
        Holder(LocalStorage(tmp_path / "file" / "run"), "run", "id")
