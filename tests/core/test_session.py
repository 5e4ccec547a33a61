"""What a session hands to the checkpointer."""

import signal

import jax.numpy as jnp
import pytest

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


def test_a_signal_stops_it_and_a_second_one_at_once(session):
    with session:
        assert not session.stops()
        signal.raise_signal(signal.SIGTERM)
        assert session.stops()
        assert session.stop_signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
