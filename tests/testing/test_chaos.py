"""The chaos kit does what it says, and does it again from the line that it printed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from axlearn_core.checkpoint import LocalStorage, ShardedCheckpointer
from axlearn_core.errors import CheckpointError, StorageError
from axlearn_testing.chaos import Chaos, ChaosError, FaultPlan, FaultyStorage, Target, TcpLink, cut, play_in_thread

COUNTER = """
import itertools, os, sys, time
for i in itertools.count():
    try:
        with open(sys.argv[1], "w") as file:
            file.write(str(i).rjust(4000))
    except OSError as error:
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(error.errno))
        os.replace(sys.argv[1] + ".new", sys.argv[1] + ".error")  # whole whenever it is read
    time.sleep(0.005)
"""


@pytest.fixture
def job(tmp_path):
    """(process, what it has counted to): a job whose steps are numbers."""
    path, greatest = tmp_path / "count", 0
    with subprocess.Popen([sys.executable, "-c", COUNTER, str(path)]) as process:

        def step():
            nonlocal greatest
            # The file is empty when it is opened, and half full with a full disk.
            with contextlib.suppress(OSError, ValueError):
                greatest = max(greatest, int(path.read_text()))
            return greatest

        yield process, step
        process.send_signal(signal.SIGCONT)
        process.kill()


def test_a_seed_is_a_plan_and_a_line_is_the_same_plan():
    options = {"kinds": ("kill", "stop", "corrupt", "fill", "cut", "slow"), "ranks": 4, "steps": (3, 90), "count": 40}
    one = Chaos(seed=7).plan(**options)
    assert one == Chaos(seed=7).plan(**options)
    assert one != Chaos(seed=8).plan(**options)
    assert FaultPlan.parse(f"2026-11-22 INFO {one}\n") == one
    assert [f.step for f in one.faults] == sorted(f.step for f in one.faults)
    assert {f.rank for f in one.faults} == {0, 1, 2, 3}
    assert str(Chaos(1).plan(steps=(5, 5), count=1)) == "chaos seed=1: kill@5:rank=0"


def test_wrong_plans_are_refused():
    with pytest.raises(ValueError, match=r"unknown kinds of faults: flood[^$]*known: kill"):
        Chaos(1).plan(kinds=("flood",), steps=(1, 2), count=1)
    with pytest.raises(ValueError, match="has no plan"):
        FaultPlan.parse("nothing")
    with pytest.raises(ValueError, match="is not a fault"):
        FaultPlan.parse("chaos seed=1: kill@x:rank=0")


def test_processes_are_stopped_slowed_and_killed_at_their_steps(job):
    process, step = job
    plan = FaultPlan.parse("chaos seed=0: stop@5:rank=0,seconds=0.3 slow@8:rank=0,seconds=0.3 kill@12:rank=0")
    records = []
    for happened in plan.play(Target(processes={0: process.pid}, step=step)):
        records.append((happened, step()))
    assert [text.partition(": ")[2] for text, _ in records] == [
        f"process {process.pid} was stopped for 0.3 s",
        f"process {process.pid} ran 10% of 0.3 s",
        f"process {process.pid} was killed",
    ]
    assert process.wait(5) == -signal.SIGKILL
    assert step() >= 12


def test_a_full_disk_ends(job, tmp_path):
    process, step = job
    plan = FaultPlan.parse("chaos seed=0: fill@2:rank=0,seconds=1,number=100")
    happened = []
    play_in_thread(plan, Target(processes={0: process.pid}, step=step), happened).join(30)
    assert "could not grow beyond 100 bytes" in happened[0]
    assert (tmp_path / "count.error").read_text() == "27"  # EFBIG
    before, end = step(), time.monotonic() + 10
    while step() <= before and time.monotonic() < end:
        time.sleep(0.01)
    assert step() > before


def test_a_bit_differs_and_the_checkpoint_is_refused(make_checkpoint, tmp_path):
    one = make_checkpoint
    plan = FaultPlan.parse("chaos seed=0: corrupt@0:rank=0,number=123457")
    happened = list(plan.play(Target(processes={}, directory=tmp_path, pattern="**/*.bin")))
    assert "flipped bit" in happened[0]
    with pytest.raises(CheckpointError, match="damaged"):
        one.place.verify(1)
    list(plan.play(Target(processes={}, directory=tmp_path)))  # the same bit again
    one.place.verify(1)
    with pytest.raises(ChaosError, match="no file in"):
        list(plan.play(Target(processes={}, directory=tmp_path, pattern="*.none")))


@pytest.fixture
def make_checkpoint(tmp_path):
    import jax.numpy as jnp

    one = ShardedCheckpointer.Config().build(directory=tmp_path / "checkpoints")
    one.save(1, {"x": jnp.arange(100)})
    one.wait()
    yield one
    one.close()


def test_a_link_is_cut_and_mended():
    with socket.create_server(("127.0.0.1", 0)) as server, TcpLink(*server.getsockname()) as link:
        client = socket.create_connection(("127.0.0.1", link.port))
        peer, _ = server.accept()
        client.sendall(b"hello")
        assert peer.recv(5) == b"hello"
        with link.down():
            client.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
            late = socket.create_connection(("127.0.0.1", link.port))
            late.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert late.recv(1) == b""
        again = socket.create_connection(("127.0.0.1", link.port))
        other, _ = server.accept()
        again.sendall(b"back")
        assert other.recv(4) == b"back"
        for end in (client, peer, late, again, other):
            end.close()


def test_the_network_of_everybody_is_not_cut(job):
    with pytest.raises(ChaosError, match="shares the network of this process"):
        cut(job[0].pid, 0.1)


def test_a_process_in_a_namespace_loses_its_network():
    code = "import time; print(1, flush=True); time.sleep(60)"
    command = ["unshare", "--net", sys.executable, "-c", code]
    if os.geteuid() or subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2, for a network namespace")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        look = ["nsenter", "--target", str(process.pid), "--net", "ip", "link", "show", "lo"]
        subprocess.run([*look[:4], "ip", "link", "set", "lo", "up"], check=True)
        records = []
        thread = threading.Thread(target=lambda: records.append(cut(process.pid, 1.0)))
        thread.start()
        time.sleep(0.4)
        during = subprocess.run(look, capture_output=True, text=True).stdout
        thread.join()
        after = subprocess.run(look, capture_output=True, text=True).stdout
        process.kill()
    assert "UP" not in during.partition(">")[0]
    assert "UP" in after.partition(">")[0]
    assert "was down" in records[0]


def test_a_storage_fails_by_its_seed(tmp_path):
    outcomes = []
    for _ in range(2):
        storage = FaultyStorage(LocalStorage(tmp_path), seed=3, failing=0.3)
        row = []
        for number in range(50):
            try:
                storage.write(f"{number}", [b"x"])
                row.append(True)
            except StorageError:
                row.append(False)
        outcomes.append(row)
        assert storage.failures == row.count(False)
    assert outcomes[0] == outcomes[1]
    assert 5 < outcomes[0].count(False) < 25


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path), full_after=1000)
    storage.write("a", [b"x" * 900])
    with pytest.raises(StorageError, match="No space left on device"):
        storage.write("b", [b"x" * 50, b"x" * 100])
    assert [f.path for f in storage.list()] == ["a"]
    assert not [p for p in Path(tmp_path).iterdir() if p.name != "a"]
