"""The training loop's reaction to steps that are not finite and to input that fails, with sessions that are given."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.errors import WorkError
from axlearn_core.train.loop import TrainLoop, _StepScalars


class Session:
    """A session that records the steps it saves."""

    def __init__(self):
        device = SimpleNamespace(platform="cpu")
        self.program = SimpleNamespace(layout=SimpleNamespace(mesh=SimpleNamespace(devices=np.array([device]))))
        self.start_step = self.step = 0
        self.max_steps, self.log_every_steps = 100, 100
        self.flops_per_step = self.peak_flops = None
        self.metrics, self.saved, self.host_scalars = {}, [], {}
        self.checkpointer = SimpleNamespace(wait=lambda: None)

    def save(self, force):
        self.saved.append(self.step)

    def describe_batch(self):
        return lambda: "batch"

    def report_step(self, step, values): ...

    def check_local_checkpoint(self, step): ...

    def log(self, step, values): ...

    def next_batch(self):
        raise OSError("the disk is gone")


def run_steps(losses, limit):
    """Pass the losses of consecutive steps to the loop's record."""
    session = Session()
    record = _StepScalars(session, limit)
    for loss in losses:
        session.step += 1
        record.hold({"loss": jnp.float32(loss)}, {})
        record.flush()


def test_only_nonfinite_steps_in_a_row_count():
    nan = float("nan")
    run_steps([nan, nan, 1.0, nan, nan, 1.0], limit=2)
    with pytest.raises(WorkError, match="3 consecutive steps had a non-finite loss"):
        run_steps([1.0, nan, nan, nan], limit=2)


@pytest.mark.parametrize(("step", "saved"), [(0, []), (3, [3])])
def test_finished_steps_are_saved_if_the_input_fails(step, saved):
    session = Session()
    session.step = step
    with pytest.raises(OSError, match="the disk is gone"):
        TrainLoop._next_batch(session, _StepScalars(session, 0))
    assert session.saved == saved


@pytest.mark.parametrize(
    ("batches", "saved"),
    [(object(), []), (SimpleNamespace(follows_training="are rollouts"), [3])],
    ids=["read", "made"],
)
def test_several_processes_save_only_if_the_input_fails_on_all(batches, saved, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    session = Session()
    session.step, session.batches = 3, batches
    with pytest.raises(OSError, match="the disk is gone"):
        TrainLoop._next_batch(session, _StepScalars(session, 0))
    assert session.saved == saved
