"""The start of a server: progress, and signals before the server is ready."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from axlearn_plugins_serving.server.startup import STOPS, Startup

SCRIPT = """
import ctypes, time
from axlearn_plugins_serving.server.startup import Startup

m = ctypes.create_string_buffer(64)  # a mutex, which blocks when it is locked again
with Startup(grace_seconds=0.2) as startup:
    startup.report("compiling the programs")
    print("begun", flush=True)
    {wait}
"""
WAITS = {
    "python": "time.sleep(60)",
    "native code": "ctypes.CDLL(None).pthread_mutex_lock(m) or ctypes.CDLL(None).pthread_mutex_lock(m)",
}


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_ends_a_start_with_one_line(number, wait):
    command = [sys.executable, "-c", SCRIPT.format(wait=WAITS[wait])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    first, last = errors.splitlines()
    assert first == "compiling the programs"
    assert last.startswith(f"stopped by {number.name} after ")
    assert last.endswith(" s while compiling the programs")


def state():
    return [signal.getsignal(number) for number in STOPS]


def test_handlers_are_restored_after_a_failed_start(capfd):
    before = state()

    def start():
        with Startup() as startup:
            assert state() != before
            startup.report("opening runs/none")
            raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        start()
    assert state() == before
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor == -1
    assert capfd.readouterr().err == "opening runs/none\n"


def test_handlers_of_the_server_stay_after_the_start(capfd):
    before, server = state(), signal.Handlers.SIG_IGN
    try:
        with Startup() as startup:
            for number in STOPS:
                signal.signal(number, server)
            startup.finish()
            assert capfd.readouterr().err.startswith("ready after ")
        assert state() == [server, server]
    finally:
        for number, handler in zip(STOPS, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)


def test_a_long_phase_is_reported_again(capfd):
    with Startup(every_seconds=0.05) as startup:
        startup.detail = lambda: ", 3 programs so far"
        startup.report("compiling the programs")
        deadline = time.monotonic() + 30
        lines = []
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)
            lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("still ")]
        startup.finish()
    assert lines[0].endswith("s, 3 programs so far")


def test_another_thread_only_reports(capfd):
    before, states = state(), []

    def start():
        with Startup() as startup:
            startup.report("opening runs/a")
            states.append(state())
            startup.finish()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert states == [before]
    assert "opening runs/a" in capfd.readouterr().err
