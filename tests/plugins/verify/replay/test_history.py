"""What a run recorded, read without its arrays."""

import json

import attrs
import pytest

import axlearn_core as ax
from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import Run
from axlearn_core.train.loop import TrainLoop
from axlearn_plugins_finetune.lora.start import StartFromRun
from axlearn_plugins_verify.replay.history import History, check_loop


class Steps:
    """A checkpointer that saved some steps."""

    def __init__(self, *steps, every=2):
        self.saved, self.every = steps, every

    def steps(self):
        return list(self.saved)

    def due(self, step):
        return step % self.every == 0


def make_history(tmp_path, *steps, logged=(), lock=None, **config):
    records = [{"step": s, "loss": 1.0 / s, "step_seconds": 0.1, "elapsed_seconds": 1.0} for s in logged]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "run.lock.json").write_text(json.dumps(lock or {}))
    quickstart = ax.resolve("quickstart", set={"max_steps": 100, "log_every_steps": 5}).config
    return History(Run(tmp_path), attrs.evolve(quickstart, **config), Steps(*steps))


@pytest.mark.parametrize(("step", "start"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (12, 4)])
def test_newest_checkpoint_before_the_step(tmp_path, step, start):
    history = make_history(tmp_path, 2, 4, logged=(5, 10))
    assert history.start_step(step, from_start=False) == start
    assert history.start_step(step, from_start=True) == 0


def test_step_soon_after_the_last_record_can_be_replayed(tmp_path):
    history = make_history(tmp_path, 2, 4, logged=(5, 10))
    assert history.start_step(15, from_start=False) == 4
    with pytest.raises(RequestError, match=r"has not reached step 16\n.*got: --step 16\n.*at most 10") as caught:
        history.start_step(16, from_start=False)
    assert caught.value.exit_code == 2


def test_missing_checkpoint_names_the_nearest_step(tmp_path):
    history = make_history(tmp_path, 6, 8, logged=(10,))
    with pytest.raises(CheckpointError, match="no checkpoint before step 5: that of step 4 is gone") as caught:
        history.start_step(5, from_start=False)
    assert "checkpoints: 6, 8\n    fix: --step 7, the nearest step that can be replayed; or --from-start" in str(
        caught.value
    )
    assert history.start_step(5, from_start=True) == 0


@pytest.mark.parametrize("origin", ["made_from", "imported_from"])
def test_derived_run_has_no_initial_state(tmp_path, origin):
    history = make_history(tmp_path, 6, logged=(10,), lock={origin: "runs/other"})
    with pytest.raises(CheckpointError, match="no checkpoint before step 6") as caught:
        history.start_step(6, from_start=True)
    assert "--from-start" not in str(caught.value)


def test_loop_that_loads_weights_has_no_initial_state(tmp_path):
    history = make_history(tmp_path, 6, logged=(10,), loop=StartFromRun.Config(run_dir="runs/other"))
    assert history.start_step(7, from_start=False) == 6
    with pytest.raises(CheckpointError, match="--step 7, the nearest"):
        history.start_step(1, from_start=False)


def test_timings_are_not_compared(tmp_path):
    history = make_history(tmp_path, logged=(5,))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "eval_loss": 2.0}\n{"step": 6, "loss": null, "nonfinite": {"loss": "-inf"}}\n')
    assert history.scalars == {5: {"loss": 0.2, "eval_loss": 2.0}, 6: {"loss": float("-inf")}}


def test_only_loops_of_plain_steps_can_be_replayed():
    quickstart = ax.resolve("quickstart").config
    check_loop(quickstart)
    check_loop(attrs.evolve(quickstart, loop=StartFromRun.Config(loop=TrainLoop.Config())))
    with pytest.raises(
        RequestError, match=r"loop: the steps of this loop cannot be replayed\n.*got: ShardedCheckpointer"
    ):
        check_loop(attrs.evolve(quickstart, loop=ShardedCheckpointer.Config()))
