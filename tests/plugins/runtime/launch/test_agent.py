"""A host's agent with real processes, and no Ray."""

import os
import signal
import time
from pathlib import Path

import pytest

from axlearn_core.compat import glibc_tunables
from axlearn_plugins_runtime.launch.agent import Agent, Setup
from support.launched_runs import alive

pytestmark = pytest.mark.slow


class Talk:
    """An agent, and what it said."""

    def __init__(self, *words, **setup):
        self.agent = Agent(Setup(words=words, **setup))
        self.heard = []

    def until(self, event, seconds=120, **values):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for heard_event in self.heard:
                if heard_event["event"] == event and all(heard_event.get(k) == v for k, v in values.items()):
                    return heard_event
            self.heard += self.agent.events(1.0)
        raise AssertionError(f"no {event} in {self.heard}")


def test_a_host_from_warm_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")  # what a user sets stays, and the rest is added
    talk = Talk("--version", logs=str(tmp_path))
    talk.agent.prepare()
    (warm,) = talk.until("ready")["pids"]
    # glibc itself may end each setting there by a zero.
    environment = Path(f"/proc/{warm}/environ").read_text().replace("\0", ":")
    tunables = glibc_tunables(os.environ)
    assert tunables.startswith("glibc.malloc.hugetlb=0:glibc.cpu")
    assert f"GLIBC_TUNABLES={tunables}:" in environment
    talk.agent.start(1, {0: {"JAX_PROCESS_ID": "0"}}, ())
    assert talk.until("started")["pid"] == warm  # no import is waited for
    end = talk.until("exited")
    assert (end["kind"], end["code"]) == ("finished", 0)
    assert "axlearn" in (tmp_path / "attempt-0001-rank-0.txt").read_text()

    talk.agent.start(2, {0: {}}, ("--nonsense",))  # cold, and with words that are wrong
    end = talk.until("exited", attempt=2)
    assert (end["kind"], end["code"]) == ("request", 2)

    talk.agent.prepare()
    talk.heard.clear()
    (warm,) = talk.until("ready")["pids"]
    os.kill(warm, signal.SIGSTOP)
    talk.agent.start(3, {1: {}}, ())
    assert talk.until("progress", attempt=3)["rank"] == 1
    stopped = [0.0]
    while stopped[-1] < 0.5:
        talk.heard.clear()
        stopped.append(talk.until("progress", attempt=3)["stopped"])
    assert talk.agent.kill() == [1]
    assert not alive(warm)

    talk.agent.prepare()
    talk.heard.clear()
    (warm,) = talk.until("ready")["pids"]
    os.kill(warm, signal.SIGKILL)
    assert talk.until("cold")["code"] == -signal.SIGKILL
    talk.agent.close()
