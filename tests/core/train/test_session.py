"""The arguments that a session passes to the checkpointer, and the decisions of listeners."""

import signal

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import CheckpointError, InputError
from axlearn_core.run.events import RunListener
from axlearn_core.run.record import RunDir
from axlearn_core.train.session import Session


class Evaluator:
    def due(self, step, last):
        return step % 4 == 0 or last

    def run(self, session):
        return {"eval_loss": 10.0 - session.step}


class Checkpointer:
    def __init__(self):
        self.saved = {}

    def due(self, step):
        return step % 2 == 0

    def save(self, step, state, *, extra, metrics):
        self.saved[step] = metrics
        self.extra = extra

    def latest_step(self):
        return None


class Batches:
    def get_state(self):
        return {}


@pytest.fixture
def session(tmp_path):
    return Session(
        program=None, state=jnp.zeros(1), step=0, max_steps=8, log_every_steps=1, seed=0, input=None, batches=Batches(),
        evaluators={"eval": Evaluator()}, checkpointer=Checkpointer(), run_dir=RunDir(tmp_path, resumes=False),
    )  # fmt: skip


def test_a_checkpoint_is_judged_only_by_what_was_measured_at_its_step(session):
    for step in range(1, 9):
        session.step = step
        session.metrics["loss"] = float(step)
        session.evaluate()
        session.save()
    saved = session.checkpointer.saved
    assert saved[4] == {"loss": 4.0, "eval_loss": 6.0}
    assert saved[6] == {"loss": 6.0}  # and not the evaluation of step 4
    assert saved[8] == {"loss": 8.0, "eval_loss": 2.0}


def test_without_a_listener_that_stops_it_a_session_runs_to_its_end(session):
    handler = signal.getsignal(signal.SIGTERM)
    with session:
        assert not session.should_stop()
        assert signal.getsignal(signal.SIGTERM) == handler
    session.raise_failure()


class Stopping(RunListener):
    """Stops at step 1, and has an error to raise afterwards."""

    def __init__(self, session):
        self.session, self.calls = session, []

    def begin(self):
        self.calls.append("begin")
        self.session.batches = Positioned()

    def end(self):
        self.calls.append("end")

    def next_batch(self):
        return None

    def should_stop(self):
        return self.session.step == 1

    def raise_failure(self):
        raise InputError("the input failed")


class Positioned(Batches):
    def describe_position(self):
        return "row 7"


def test_a_listener_may_stop_a_session_and_replace_its_batches(session):
    stopping = Stopping(session)
    session.events.add(stopping)
    with session:
        assert not session.should_stop()
        assert session.next_batch() is None
        assert session.describe_batch()() == "row 7"
        session.step = 1
        assert session.should_stop()
    assert stopping.calls == ["begin", "end"]
    with pytest.raises(InputError, match="the input failed"):
        session.raise_failure()


def test_the_first_checkpoint_is_noted_in_the_lock_once_it_is_complete(session, monkeypatch):
    session.run_dir.write("", {"run": "id"})
    session.record_checkpoint()
    assert "saved" not in session.run_dir.read_lock()
    monkeypatch.setattr(session.checkpointer, "latest_step", lambda: 2)
    session.record_checkpoint()
    assert session.run_dir.read_lock() == {"run": "id", "saved": True}


class Buffer:
    """A loop that holds samples."""

    def __init__(self, rows=()):
        self.rows = list(rows)

    def get_state(self):
        return {"rows": self.rows}

    def set_state(self, state):
        self.rows = state["rows"]


def test_checkpoints_contain_the_state_of_the_loop(session):
    session.loop = Buffer([np.arange(3, dtype=np.int32)])
    session.step = 2
    session.save()
    saved, session.loop = session.checkpointer.extra, Buffer()
    session.restore_loop(saved)
    assert [row.tolist() for row in session.loop.rows] == [[0, 1, 2]]


def test_a_loop_without_state_rejects_the_state_of_another_loop(session):
    session.loop = Buffer([np.zeros(2)])
    session.step = 2
    session.save()
    session.loop = None
    with pytest.raises(CheckpointError, match="the state of another training loop"):
        session.restore_loop(session.checkpointer.extra)
    session.restore_loop({"step": 2})  # a checkpoint without a loop's state


def test_a_shared_resource_is_built_once_and_closed_at_the_end(session):
    events = []

    class Engine:
        def close(self):
            events.append("closed")

    def build():
        events.append("built")
        return Engine()

    assert session.share("engine", build) is session.share("engine", build)
    assert session.share("name", lambda: "plain") == "plain"
    session.closing.close()
    assert events == ["built", "closed"]
