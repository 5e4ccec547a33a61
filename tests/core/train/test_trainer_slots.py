"""Slots of the trainer that are empty by default, and inputs that need what a model lacks."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.config import Configurable, check, node
from axlearn_core.errors import ConfigError
from axlearn_core.train.evaluators import Periodic
from axlearn_core.train.loop import TrainLoop
from axlearn_testing import train as suite


class Diary(Configurable):
    """A watchdog and a profiler that keep what they are told."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, cfg, *, run_dir):
        self.kept.clear()

    def start(self):
        self.kept.append("start")

    def beat(self, phase, step):
        self.kept.append((phase, step))

    def before(self, step):
        self.kept.append(("before", step))

    def after(self, step, scalars):
        self.kept.append(("after", step, sorted(scalars)[:1]))

    def close(self):
        self.kept.append("close")


class Failing(Diary):
    """Fails in a step."""

    def before(self, step):
        raise RuntimeError("in a step")


class Arrays(Periodic):
    """An evaluator that leaves its scalars on the device."""

    def run(self, session):
        return {f"{self.name}_norm": jnp.float32(2.5)}


class Joined(Configurable):
    """A process group that says when it was joined."""

    times: ClassVar[list[int]] = []

    def __init__(self, cfg):
        pass

    def initialize(self):
        self.times.append(1)


class Words(suite.Noise):
    """An input that cannot do without a vocabulary."""

    def __init__(self, cfg, *, seed, process_index, process_count, vocab_size):
        raise AssertionError("never built without a vocabulary")


class Reluctant(suite.Noise):
    """An input that declares its shapes and counts the batches that were read."""

    read: ClassVar[list[int]] = []

    @node
    class Config(suite.Noise.Config):
        def batch_shapes(self):
            return {"x": ((8, 4), "float32"), "y": ((8, 2), "float32")}

    def train(self):
        self.read.clear()
        return Counted(self.read)


class Counted(suite.Numbers):
    def __init__(self, read):
        super().__init__()
        self.batches_read = read

    def __next__(self):
        self.batches_read.append(self.position)
        return super().__next__()


class Stateful(TrainLoop):
    """A loop whose checkpoints hold the steps that it has begun."""

    restored: ClassVar[list[Any]] = []

    def __init__(self, cfg):
        super().__init__(cfg)
        self.steps = np.zeros(0, np.int64)

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]
        self.restored.append(self.steps.tolist())

    def _step(self, session, batch):
        self.steps = np.append(self.steps, session.step)
        return super()._step(session, batch)


RUN = suite.TrainerSuite()


def test_the_first_compile_reads_no_batch_if_the_input_declares_shapes(tmp_path):
    RUN.run(tmp_path / "run", input=Reluctant.Config(), max_steps=2)
    assert Reluctant.read == [0, 1]


def test_a_loop_gets_its_state_back_from_the_checkpoint(tmp_path):
    RUN.run(tmp_path / "run", loop=Stateful.Config(), max_steps=2)
    RUN.run(tmp_path / "run", loop=Stateful.Config(), max_steps=4)
    assert Stateful.restored == [[0, 1]]


def test_a_watchdog_hears_of_every_phase(tmp_path):
    RUN.run(tmp_path / "run", watchdog=Diary.Config(), max_steps=2)
    calls = Diary.kept
    assert calls[:3] == ["start", ("restore", 0), ("compile", 0)]
    assert calls[3:7] == [("input", 0), ("step", 0), ("compile", 0), ("step", 0)]
    assert calls[7:9] == [("input", 1), ("step", 1)]
    assert {("evaluate", 2), ("save", 2)} <= set(calls)
    assert calls[-1] == "close"


def test_a_profiler_is_around_every_step(tmp_path):
    RUN.run(tmp_path / "run", profiler=Diary.Config(), max_steps=2)
    steps = [entry[:2] for entry in Diary.kept if entry != "close"]
    assert steps == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    assert Diary.kept[-1] == "close"


def test_both_are_closed_where_a_step_fails(tmp_path):
    with pytest.raises(RuntimeError, match="in a step"):
        RUN.run(tmp_path / "run", profiler=Failing.Config())
    assert Diary.kept[-1] == "close"


def test_scalars_of_an_evaluator_may_be_arrays(tmp_path):
    result = RUN.run(tmp_path / "run", evaluators={"probe": Arrays.Config(every_steps=2)})
    assert result.metrics["probe_norm"] == 2.5
    assert type(result.metrics["probe_norm"]) is float
    assert list(RUN.saved(tmp_path / "run")) == [2, 4, 5], "checkpoints keep the metrics"


def test_processes_are_joined_by_the_slot(tmp_path):
    RUN.run(tmp_path / "run", distributed=Joined.Config(), max_steps=1)
    assert Joined.times == [1]


def test_an_input_that_needs_a_vocabulary_rejects_a_model_without_one(tmp_path):
    with pytest.raises(ConfigError) as error:
        RUN.run(tmp_path / "run", input=Words.Config())
    assert "Words.Config requires 'vocab_size', which its parent does not offer" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_needs_the_state_is_rejected_before_building():
    class Curious(Configurable):
        def __init__(self, cfg, *, run_dir, state):
            pass

    with pytest.raises(ConfigError) as error:
        check(RUN.trainer(trackers=(Curious.Config(),)))
    assert "trackers.0" in str(error.value)
    assert "expected: Tracker, which is offered run_dir" in str(error.value)
