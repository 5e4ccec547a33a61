"""Attacks on the data of a real run: changed files, killed and stopped workers, files that go bad."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import cli_runs

TEXT = "".join(f"line {i} of some text\n" for i in range(8000))
BYTES = ("input.tokenizer={type: byte-tokenizer}", "model.vocab_size=257")


def source(file):
    return (f"input.source={{type: files, paths: {file}}}", *BYTES)


def children(pid):
    """The processes of Grain's workers."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in below if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(ready, seconds=120):
    end = time.monotonic() + seconds
    while not (actual := ready()):
        assert time.monotonic() < end, "it did not get there"
        time.sleep(0.05)
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swapped", "appended", "truncated"])
def test_a_run_is_not_continued_on_other_data(kind, tmp_path):
    data, run = tmp_path / "data.txt", tmp_path / "run"
    data.write_text(TEXT)
    cli_runs.axlearn(*cli_runs.arguments(run, steps=3, settings=source(data)))
    lock = (run / "run.lock.json").read_bytes()
    data.write_text({"swapped": TEXT.swapcase(), "appended": TEXT + "x", "truncated": TEXT[:20_000]}[kind])
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=6, settings=source(data)), code=2)
    assert "data.txt: " in result.stderr
    assert "nothing was written" in result.stderr
    assert (run / "run.lock.json").read_bytes() == lock
    assert len(cli_runs.logged(run)) == 3
    cli_runs.axlearn(*cli_runs.arguments(run, steps=4, settings=source(data), more=("--allow-drift",)))
    assert len(cli_runs.logged(run)) == 4
    facts = json.loads((run / "run.lock.json").read_text())["data"]
    assert facts["bytes"] == data.stat().st_size


@pytest.mark.slow
def test_a_lock_that_is_gone_hides_no_change(tmp_path):
    data, run = tmp_path / "data.txt", tmp_path / "run"
    data.write_text(TEXT)
    cli_runs.axlearn(*cli_runs.arguments(run, steps=3, settings=source(data)))
    (run / "run.lock.json").unlink()
    data.write_text(TEXT.swapcase())
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=6, settings=source(data)), code=2)
    assert "data.txt: " in result.stderr


@pytest.mark.slow
def test_data_that_goes_bad_costs_no_step(tmp_path):
    data, run = tmp_path / "data.txt", tmp_path / "run"
    data.write_text(TEXT)
    settings = (*source(data), "checkpointer.every_steps=1000", "input.prefetch=1")
    process = cli_runs.start(*cli_runs.arguments(run, steps=5000, settings=settings))
    wait_for(lambda: len(cli_runs.logged(run)) > 5 or process.poll() is not None)
    data.write_text(TEXT.swapcase())
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err[-3000:]
    assert "changed while it was in use" in err
    assert "Traceback" not in err
    last = cli_runs.losses(run)[-1][0]
    assert last > 5
    assert (run / "checkpoints" / str(last)).is_dir()
    data.write_text(TEXT)
    cli_runs.axlearn(*cli_runs.arguments(run, steps=last + 2, settings=settings))
    assert [step for step, _ in cli_runs.losses(run)] == list(range(1, last + 3))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stands_still_is_replaced(number, tmp_path):
    settings = ("input.workers=2", "input.worker_seconds=20", "input.prefetch=1", "checkpointer.every_steps=1000")
    whole, run = tmp_path / "whole", tmp_path / "run"
    cli_runs.axlearn(*cli_runs.arguments(whole, steps=1500, settings=("checkpointer.every_steps=1000",)), fresh=True)
    process = cli_runs.start(*cli_runs.arguments(run, steps=1500, settings=settings))
    wait_for(lambda: len(cli_runs.logged(run)) > 3 or process.poll() is not None)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert f"process {workers[0]}" in err
    assert "a new worker continues" in err
    assert cli_runs.losses(run) == cli_runs.losses(whole)


@pytest.mark.slow
def test_one_ctrl_c_saves_although_a_worker_stands_still(tmp_path):
    settings = ("input.workers=1", "input.prefetch=1", "checkpointer.every_steps=1000")
    run = tmp_path / "run"
    process = cli_runs.start(*cli_runs.arguments(run, steps=5000, settings=settings))
    wait_for(lambda: len(cli_runs.logged(run)) > 3 or process.poll() is not None)
    os.kill(children(process.pid)[-1], signal.SIGSTOP)
    count = -1
    while count != len(cli_runs.logged(run)):  # until what was prepared is used up
        count = len(cli_runs.logged(run))
        time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-3000:]
    assert (run / "checkpoints" / str(cli_runs.losses(run)[-1][0])).is_dir()
    assert "Traceback" not in err


STUBBORN = """
import sys, time
import axlearn_plugins_runtime.job.signals as signals

signals.owns_process.set()
held = signals.StopSignals(lambda: print("asked", flush=True), ends_input=False)
held.install(2)
ready = False
while True:
    try:
        if not ready:  # inside: a second signal that comes soon finds the handler around it
            ready = True
            print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("swallowed", flush=True)
"""


def test_a_second_ctrl_c_ends_what_swallows_it():
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "swallowed" in out
    assert "stopped by the second signal" in err
