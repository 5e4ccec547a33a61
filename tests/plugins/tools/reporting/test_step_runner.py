"""Steps that are computed again from a checkpoint, without writing anything."""

from contextlib import ExitStack

import attrs
import pytest

import axlearn_core as ax
from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.compose import compose
from axlearn_core.run import Run
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_finetune.lora.start import StartFromRun
from axlearn_plugins_tools.reporting.step_runner import StepRunner, open_checkpoints, unwrap_loop
from support import api_runs
from support.written_runs import write_run


@pytest.mark.slow
def test_a_step_is_computed_again_from_its_checkpoint(tmp_path):
    api_runs.train(tmp_path / "a", steps=4, **{"checkpointer.every_steps": 2})
    run = Run(tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with ExitStack() as closing:
        checkpointer = open_checkpoints(run, run.config.checkpointer)
        closing.callback(checkpointer.close)
        runner = StepRunner.open(compose(run.config), checkpointer, 2, closing)
        assert runner.recorded_facts(run.lock) == runner.facts
        runner.position_data()
        steps = list(runner.run(4, keep=True))
    assert [step.number for step in steps] == [3, 4]
    assert [step.scalars["loss"] for step in steps] == api_runs.losses(tmp_path / "a")[2:]
    assert [step.before is None for step in steps] == [True, False]
    assert int(steps[1].before.step) == 3
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_the_loop_below_initial_weights_is_found():
    loop = TrainLoop.Config()
    assert unwrap_loop(loop) == (loop, False)
    assert unwrap_loop(StartFromRun.Config(loop=StartFromRun.Config(loop=loop))) == (loop, True)


def test_a_reader_leaves_other_tiers_alone(tmp_path):
    write_run(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    config = ax.resolve("quickstart", set={"checkpointer.every_steps": 3}).config
    checkpointer = open_checkpoints(Run(tmp_path / "a"), attrs.evolve(config.checkpointer, uri="memory://elsewhere"))
    assert type(checkpointer) is ShardedCheckpointer
    assert checkpointer.due(3)
    assert sorted(tmp_path.rglob("*")) == before
