"""metrics.jsonl and samples.jsonl: what is written, what survives a stop, what a resumption cuts."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from axlearn_core.errors import WorkError
from axlearn_core.run.metric_files import read_jsonl
from axlearn_core.train.trackers import JsonlTracker


def tracker(run_dir):
    return JsonlTracker.Config().build(run_dir=run_dir, experiment="ignored")


def lines(run_dir, name="metrics.jsonl"):
    return (run_dir / name).read_text().splitlines()


def without_time(run_dir):
    return [{k: v for k, v in json.loads(line).items() if k != "elapsed_seconds"} for line in lines(run_dir)]


def run(run_dir, first, last, stop_at=None):
    instance = tracker(run_dir)
    instance.start({"start_step": first, "max_steps": last})
    for step in range(first + 1, (stop_at or last) + 1):
        instance.log(step, {"loss": 1 / step, "step_seconds": 0.25})
        if step % 4 == 0:
            instance.log(step, {"eval_loss": 2 / step})
            instance.text(step, "sample", f"text of {step}")
    instance.close()


def test_one_object_per_call_with_exact_values(tmp_path):
    instance = tracker(tmp_path / "new")
    instance.start({"start_step": 0})
    loss = np.float32(0.1)
    instance.log(np.int64(3), {"loss": loss, "tokens": 7})
    instance.text(3, "sample", "lone \ud800 and\nnewline")
    first = json.loads(lines(tmp_path / "new")[0])  # before close: each line is handed over at once
    instance.close()
    assert first.pop("elapsed_seconds") >= 0
    assert first == {"step": 3, "loss": float(loss), "tokens": 7}
    assert list(first) == ["step", "loss", "tokens"]
    assert [json.loads(s) for s in lines(tmp_path / "new", "samples.jsonl")] == [
        {"step": 3, "name": "sample", "text": "lone \ud800 and\nnewline"}
    ]


def test_values_that_are_not_finite_stay_valid_json(tmp_path):
    instance = tracker(tmp_path)
    instance.start({})
    instance.log(1, {"loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    instance.close()

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(lines(tmp_path)[0], parse_constant=refuse)
    assert record["loss"] is None
    assert record["lr"] == 0.5
    assert record["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"}


@pytest.mark.parametrize("resumed_at", [0, 3, 4, 8, 12])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path, resumed_at):
    run(tmp_path / "whole", 0, 12)
    run(tmp_path / "parts", 0, 12, stop_at=None if resumed_at == 12 else 11)
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    run(tmp_path / "parts", resumed_at, 12)
    assert without_time(tmp_path / "parts") == without_time(tmp_path / "whole")
    assert lines(tmp_path / "parts", "samples.jsonl") == lines(tmp_path / "whole", "samples.jsonl")
    assert not list((tmp_path / "parts").glob("*.tmp"))


def test_elapsed_time_goes_on_where_the_restored_step_was(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 5, "loss": 1.0, "elapsed_seconds": 100.0}\n{"step": 9, "loss": 1.0, "elapsed_seconds": 900.0}\n'
    )
    run(tmp_path, 5, 6)
    assert [100 <= json.loads(line)["elapsed_seconds"] < 200 for line in lines(tmp_path)] == [True, True]


def test_reading_names_what_is_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == ([], [])
    path.write_bytes(b'{"step": 1}\n\xff\x00\n[2]\n{"step": true}\n{"step": 3}\n{"st')
    records, remarks = read_jsonl(path)
    assert records == [{"step": 1}, {"step": 3}]
    ignored = [r.partition(": ignoring ")[2].partition(",")[0] for r in remarks]
    assert ignored == ["line 2", "line 3", "line 4", "the last line"]


def test_a_killed_process_loses_no_complete_line(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from axlearn_core.train.trackers import JsonlTracker
        made = JsonlTracker.Config().build(run_dir=Path(sys.argv[1]))
        made.start({"start_step": 0})
        for step in range(1, 8):
            made.log(step, {"loss": 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], env={**os.environ}, check=False
    )
    assert process.returncode == -signal.SIGKILL
    records, remarks = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 8))
    assert not remarks


def test_a_full_disk_is_a_work_error_with_its_reason(tmp_path):
    instance = tracker(tmp_path)
    instance.start({})
    instance.log(1, {"loss": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        with pytest.raises(WorkError, match=r"metrics\.jsonl: File too large"):
            instance.log(2, {f"value_{i}": 0.5 for i in range(100)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    instance.close()
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]


def test_a_directory_that_cannot_be_made_is_a_work_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="Not a directory"):
        tracker(tmp_path / "file" / "run").start({})
