"""A run that stops early in a job of one process; e2e/test_processes.py has several."""

import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.run.events import owns_process
from axlearn_core.run.record import RunDir
from axlearn_core.train.session import Session
from axlearn_plugins_runtime.job import signals
from axlearn_plugins_runtime.job.stops import early_stop


class Batches:
    """Gives a batch, and none after it."""

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        if self.count > 1:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
        return {"x": self.count}

    def get_state(self):
        return {}


@pytest.fixture
def session(tmp_path):
    program = SimpleNamespace(
        put=lambda batch: batch,
        functional=SimpleNamespace(describe=lambda: None),
        config=SimpleNamespace(model=None),
    )
    session = Session(
        program=program, state=jnp.zeros(1), step=0, max_steps=8, log_every_steps=1, seed=0,
        input=None, batches=Batches(), evaluators={}, checkpointer=None, run_dir=RunDir(tmp_path, resumes=False),
    )  # fmt: skip
    session.events.add(early_stop(session))
    return session


def test_a_signal_stops_it_and_a_second_one_at_once(session):
    handler = signal.getsignal(signal.SIGTERM)
    with session:
        assert not session.should_stop()
        signal.raise_signal(signal.SIGTERM)
        assert session.should_stop()
        assert session.stop_signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == handler
    session.raise_failure()  # a signal is not a failure


def test_a_second_signal_ends_only_a_process_of_the_command_line(session):
    with session:
        assert signal.set_wakeup_fd(-1) == -1, "a timer would end the process that called ax.train"


def test_the_command_owns_the_process_only_while_it_trains(monkeypatch):
    owned = []

    def train(request, **arguments):
        owned.append(owns_process.is_set())
        raise RequestError("not today")

    monkeypatch.setattr("axlearn_core.train.api.train", train)
    assert CliRunner().invoke(cli, ["train", "quickstart"]).exit_code != 0
    assert owned == [True]
    assert not owns_process.is_set()


def test_a_signal_ends_the_wait_for_a_batch(session, monkeypatch, capsys):
    monkeypatch.setattr(signals, "INPUT_SECONDS", 0.01)
    with session:
        assert session.next_batch() == {"x": 1}
        assert session.next_batch() is None
        assert session.should_stop()
    assert session.stop_signal == signal.SIGTERM
    assert "the input returned no batch in time; stopping without it" in capsys.readouterr().err


class Rollouts(Batches):
    """Batches of the present weights."""

    follows_training = "are rollouts of the present weights"


def test_batches_that_follow_training_are_not_read_ahead(session, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    session.batches = batches = Rollouts()
    with session:
        assert session.batches is batches
    assert batches.count == 0
