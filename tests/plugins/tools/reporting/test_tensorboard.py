"""Event files, read back by TensorBoard's own reader."""

import resource
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from axlearn_core.errors import WorkError
from axlearn_plugins_tools.reporting.tensorboard import TensorBoardTracker


def run(run_dir, first, last):
    tracker = TensorBoardTracker.Config().build(run_dir=run_dir)
    tracker.start({"start_step": first, "max_steps": last})
    for step in range(first + 1, last + 1):
        tracker.log(step, {"loss": 10.0 * first + step, "learning_rate": 1e-3})
        if step % 2 == 0:
            tracker.log(step, {"eval_loss": float(step)})
            tracker.text(step, "sample", "def f():\n    return <b>\x1b[31m")
    return tracker


def read(run_dir):
    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return reader.Reload()


def test_tensorboard_reads_scalars_and_text(tmp_path):
    run(tmp_path, 0, 4).close()
    reader = read(tmp_path)
    assert set(reader.Tags()["scalars"]) == {"train/loss", "train/learning_rate", "evaluation/eval_loss"}
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [e.step for e in reader.Scalars("evaluation/eval_loss")] == [2, 4]
    sample = reader.Tensors("sample/text_summary")[0]
    text = tensor_util.make_ndarray(sample.tensor_proto).item().decode()
    assert text == "    def f():\n        return <b>\N{REPLACEMENT CHARACTER}[31m"


@pytest.mark.parametrize("resumed_at", [0, 3])
def test_a_resumed_run_replaces_what_came_after_the_restored_step(tmp_path, resumed_at):
    abandoned = run(tmp_path, 0, 6)  # a killed process closes nothing; what it flushed is there
    abandoned._flush()
    run(tmp_path, resumed_at, 8).close()  # within the same second: must be another file
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")]
    old = [(s, float(s)) for s in range(1, resumed_at + 1)]
    assert events == old + [(s, 10.0 * resumed_at + s) for s in range(resumed_at + 1, 9)]
    abandoned.close()


def test_a_full_disk_is_a_work_error_with_its_reason(tmp_path):
    tracker = TensorBoardTracker.Config(flush_seconds=0.0).build(run_dir=tmp_path)
    tracker.start({})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WorkError, match="tensorboard: File too large"):
            tracker.log(1, {f"value_{i}": 0.5 for i in range(100)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.close()


def test_configs_of_trackers_load_no_heavy_library():
    code = (
        "import sys, axlearn_plugins_tools.reporting.tensorboard as t; t.TensorBoardTracker.Config();"
        "print(sorted({'tensorboardX', 'wandb', 'tensorflow', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
