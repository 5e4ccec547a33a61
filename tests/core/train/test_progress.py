"""What a supervisor sees of a process, and what it may keep in a run directory before the run."""

import time

import pytest

from axlearn_core.errors import RequestError
from axlearn_core.run.phases import PROGRESS, PhaseClock, Progress
from axlearn_core.run.record import RunDir


def test_each_phase_is_told_with_its_step(tmp_path, monkeypatch):
    file = tmp_path / "progress"
    monkeypatch.setenv(PROGRESS, str(file))
    before = time.monotonic()
    clock = PhaseClock()
    assert Progress.read(file) is None  # nothing began
    clock.begin("restore")
    clock.begin("evaluate", step=1234567890)
    since, step, phase = Progress.read(file)
    assert (step, phase) == (1234567890, "evaluate")
    assert before - 0.001 <= since <= time.monotonic() + 0.001  # rounded
    clock.begin("step")  # the step stays what it was
    assert Progress.read(file)[1:] == (1234567890, "step")
    assert file.stat().st_size == Progress.SIZE


def test_nobody_watches(tmp_path, monkeypatch):
    monkeypatch.delenv(PROGRESS, raising=False)
    PhaseClock().begin("step")
    monkeypatch.setenv(PROGRESS, str(tmp_path / "absent" / "progress"))
    PhaseClock().begin("step")  # training matters more than being watched
    assert Progress.read(tmp_path / "absent" / "progress") is None


def test_a_supervisor_may_have_been_in_the_directory_before_the_run(tmp_path):
    (tmp_path / "processes.jsonl").write_text("{}\n")
    (tmp_path / "launch").mkdir()
    assert not RunDir.check(tmp_path, None, None, allow_drift=False).resumes  # type: ignore[arg-type]
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RequestError, match=r"not a run.*\n.*got: thesis.tex"):
        RunDir.check(tmp_path, None, None, allow_drift=False)  # type: ignore[arg-type]
