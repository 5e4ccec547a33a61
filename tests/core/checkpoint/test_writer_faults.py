"""Faults while a checkpoint is written."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.errors import WorkError

# Saves steps without end; the state of step i holds i everywhere, and the metric says so too.
WRITER = """
import sys, jax, jax.numpy as jnp
from axlearn_core.plugins.registry import registry
one = registry().component(sys.argv[2])(keep_last=2).build(directory=sys.argv[1])
first = (one.latest_step() or 0) + 1
print("ready", flush=True)
for step in range(first, first + 10_000):
    one.save(step, {f"w{i}": jnp.full((64, 256), step, jnp.int32) for i in range(8)}, metrics={"step": step})
"""


def start(directory: Path, kind: str) -> subprocess.Popen[str]:
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER, str(directory), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def killed_during_a_save(directory: Path, kind: str, delay: float) -> None:
    """Starts the writer, waits for it to be within a save, then kills it after `delay` more seconds."""
    with start(directory, kind) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 60
            while not list(directory.glob(".*.partial")) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)


def whole_or_absent(make, directory: Path) -> int | None:
    """Every step that is listed is whole; the newest one."""
    one = make(directory=directory)
    like = {f"w{i}": jnp.zeros((64, 256), jnp.int32) for i in range(8)}
    for step in one.steps():
        got, _ = one.restore(step, like)
        assert all((x == step).all() for x in got.values())
        assert one.inspect(step).metrics == {"step": step}
    return one.latest_step()


def kill_often(make, kind: str, directory: Path, times: int, seed: int) -> None:
    dice, newest, cut_off = random.Random(seed), 0, 0
    for _ in range(times):
        killed_during_a_save(directory, kind, dice.random() * 0.4)
        cut_off += bool(list(directory.glob(".*.partial")))
        newest, before = whole_or_absent(make, directory) or 0, newest
        assert newest >= before
    assert cut_off, "no save was cut off: the test shows nothing"
    again = make(directory=directory, keep_last=2)
    again.save(newest + 1, {"x": jnp.ones(())})
    again.wait()
    assert not [p.name for p in directory.iterdir() if not p.name.isdecimal()]  # what was cut off is cleaned up
    assert len(again.steps()) <= 2


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(make, kind, tmp_path):
    kill_often(make, kind, tmp_path / "checkpoints", 5, seed=0)


@pytest.mark.slow
def test_killed_in_the_middle_of_many_saves(make, kind, tmp_path):
    kill_often(make, kind, tmp_path / "checkpoints", 20, seed=1)


def fails_then_recovers(make, directory: Path, reason: str, make_room) -> None:
    """A save that fails is reported by the next call; the checkpoint before it stays, and a later save works."""
    one, big = make(directory=directory, max_failed_saves=0), {"x": jax.random.bits(jax.random.key(0), (1 << 20,))}
    one.save(2, big)
    with pytest.raises(WorkError, match=rf"step 2 could not be written to .*{reason}[^$]*intact: 1\n") as error:
        one.wait()
    assert error.value.exit_code == 1
    assert sorted(p.name for p in directory.iterdir()) == ["1"]  # nor does it leave half a checkpoint to fill the disk
    one.save(3, big)
    with pytest.raises(WorkError, match="step 3"):
        one.save(4, big)
    make_room()
    assert one.save(5, big)
    one.wait()
    assert one.steps() == [1, 5]
    got, _ = one.restore(1, {"x": jnp.zeros(4)})
    assert (got["x"] == 1).all()


def seeded(make, directory: Path) -> None:
    one = make(directory=directory)
    one.save(1, {"x": jnp.ones(4)})
    one.wait()


def test_a_file_that_cannot_grow(make, tmp_path):
    seeded(make, tmp_path / "checkpoints")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        fails_then_recovers(
            make, tmp_path / "checkpoints", "File too large", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("needs root, to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(make, small_disk):
    seeded(make, small_disk / "checkpoints")

    def grow():
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)

    fails_then_recovers(make, small_disk / "checkpoints", "No space left on device", grow)


def test_a_disk_that_became_read_only(make, small_disk):
    seeded(make, small_disk / "checkpoints")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    one = make(directory=small_disk / "checkpoints", max_failed_saves=0)
    with pytest.raises(WorkError, match=r"step 2[^$]*Read-only file system[^$]*intact: 1"):
        one.save(2, {"x": jnp.ones(4)})
    assert one.steps() == [1]
