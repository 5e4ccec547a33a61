"""The progress of a process as its supervisor sees it."""

import time

from axlearn_plugins_runtime.job.phases import PhaseClock
from axlearn_plugins_runtime.job.progress import PROGRESS, Progress


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
