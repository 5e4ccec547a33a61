"""Reports about a lost process, with a fake key-value store. e2e/test_processes.py loses real processes."""

import subprocess
import sys
import time

import jax
import pytest

from axlearn_plugins_runtime.job import peers
from axlearn_plugins_runtime.job.peers import PeerWatch


class Store:
    """The client of a coordinator."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]


@pytest.fixture
def job(monkeypatch):
    """(the store, `watch(rank)` -> (a watch, what it said)) of a job of three processes."""
    store = Store()
    monkeypatch.delenv("AXLEARN_JOB", raising=False)
    monkeypatch.setattr(peers, "coordination_client", lambda: store)
    monkeypatch.setattr(peers, "coordinator_address", lambda: "10.0.0.1:4321")
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(peers, "LOST_SECONDS", 0.5)
    monkeypatch.setattr(sys, "argv", ["/bin/axlearn", "train", "quickstart", "--run-dir", "runs/a b"])
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    def watch(rank):
        monkeypatch.setattr(jax, "process_index", lambda: rank)
        lines = []
        return PeerWatch("runs/a b", lines.append), lines

    return store, watch


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_process_without_heartbeats_is_reported_once_by_all(job):
    store, watch = job
    store.values["axlearn/beats/2"] = "7 on node-2 (process 99)"
    first, lines = watch(0)
    first.start(lambda: 24)
    wait_for(lambda: lines)
    second, heard = watch(1)
    second.start(lambda: 24)
    wait_for(lambda: heard)
    time.sleep(0.3)
    second.close()
    first.close()
    (line,) = lines
    assert line.startswith("error: process 2 on node-2 (process 99) has sent no heartbeat since ")
    assert line.endswith(
        " UTC; newest checkpoint: step 24 of runs/a b; to resume: `axlearn train quickstart --run-dir 'runs/a b'` on every host"
    )
    assert heard == lines


def test_a_finished_process_is_not_lost_and_a_returned_one_is_reported(job):
    store, watch = job
    store.values["axlearn/beats/1"] = "ended"
    store.values["axlearn/beats/2"] = "7 on node-2 (process 99)"
    first, lines = watch(0)
    first.start(lambda: 0)
    wait_for(lambda: lines)
    assert "newest checkpoint: none yet" in lines[0]
    store.values["axlearn/beats/2"] = "8 on node-2 (process 99)"
    wait_for(lambda: lines[1:])
    store.values["axlearn/beats/2"] = "ended"
    time.sleep(1.0)
    first.close()
    assert lines[1:] == ["process 2 sends heartbeats again"]


def test_a_process_that_is_aborted_leaves_its_line(job):
    line = 'process 1 lost process 0 at 10.0.0.1:4321, or was killed; newest checkpoint: step 24 of run\'s; to resume: `a "b"`'
    words = ["sh", "-c", peers._NOTICE]
    for text, expected in ((f"an older line\n{line}\n", f"error: {line}; noticed at "), (f"{line}\n\n", "")):
        shell = subprocess.run(words, input=text, capture_output=True, text=True)
        assert shell.stderr.startswith(expected)
        assert len(shell.stderr.splitlines()) == bool(expected)


def test_a_process_that_ends_in_order_says_nothing(job, capfd):
    _, watch = job
    second, lines = watch(1)
    second.start(lambda: 24)
    time.sleep(0.5)
    second.close()
    assert lines == []
    assert "lost its connection" not in capfd.readouterr().err


def test_below_a_supervisor_nothing_is_watched(job, monkeypatch):
    store, watch = job
    monkeypatch.setenv("AXLEARN_JOB", "a")
    first, _ = watch(0)
    first.start(lambda: 24)
    first.close()
    assert store.values == {}
