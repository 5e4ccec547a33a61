"""Scratch directories of compilers are removed when their process ends in any way."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from axlearn_plugins_plan import buffers, scratch

HOLDS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a parent such as nohup may ignore them
signal.signal(signal.SIGINT, signal.default_int_handler)
from axlearn_plugins_plan.buffers import open_dump
with open_dump({}) as dump:
    (dump.directory / "module.txt").write_text("large")
    print(dump.directory, flush=True)
    time.sleep(600)
"""


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP], ids=lambda s: s.name)
def test_a_process_that_is_killed_leaves_nothing(tmp_path, number):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout
    directory = process.stdout.readline().strip()
    assert directory.startswith(str(tmp_path))
    os.killpg(process.pid, number)  # like a terminal or a scheduler, which signal the whole group
    assert process.wait() != 0
    process.stdout.close()
    assert wait_until(lambda: not os.path.exists(directory))
    assert list(tmp_path.iterdir()) == []


def test_what_no_process_holds_is_removed_and_what_one_holds_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    abandoned, other = tmp_path / f"{scratch.PREFIX}abc", tmp_path / "mine"
    for folder in (abandoned, other):
        folder.mkdir()
        (folder / "module.txt").write_text("large")
    link = tmp_path / f"{scratch.PREFIX}link"
    link.symlink_to(other)
    with buffers.open_dump({}) as first, buffers.open_dump({}) as second:
        assert not abandoned.exists()
        assert first.directory != second.directory
        assert first.directory.is_dir(), "a second plan does not remove it"
    assert sorted(tmp_path.iterdir()) == [link, other]
    assert (other / "module.txt").exists()
