"""Goodput: from the records of phases to the page."""

import json

import pytest

from axlearn_core.run.metric_files import PHASES
from axlearn_plugins_runtime.job.phases import PhaseClock
from axlearn_plugins_tools.reporting.goodput import compute_goodput, read_attempts
from axlearn_plugins_tools.reporting.page import render
from axlearn_plugins_tools.reporting.run import read_run
from axlearn_testing import TrainerSuite


def record(attempt, time, event, steps, **seconds):
    day = "2026-01-01T00:"
    return {
        "attempt": f"{day}{attempt}+00:00", "time": f"{day}{time}+00:00", "event": event, "step": steps,
        "seconds": seconds, "host": "h", "pid": 1,
    }  # fmt: skip


KILLED_AND_RESUMED = [
    record("00:00", "00:02", "start", 0, start=2.0),
    record("00:00", "00:12", "run", 10, start=2.0, compile=4.0, step=5.0, save=1.0),
    record("00:00", "00:22", "run", 30, start=2.0, compile=4.0, step=15.0, save=1.0),
    record("00:32", "00:33", "start", 20, start=1.0),
    record("00:32", "00:43", "end", 40, start=1.0, restore=1.0, input=3.0, step=6.0),
]


def test_the_time_of_two_attempts_adds_up():
    goodput = compute_goodput(read_attempts(KILLED_AND_RESUMED))
    assert goodput.seconds == {
        "productive": 16.0, "start": 3.0, "restore": 1.0, "compile": 4.0, "input": 3.0, "evaluate": 0.0, "save": 1.0,
        "lost": 5.0, "idle": 10.0,
    }  # fmt: skip
    assert goodput.total == 43.0, "from the first start to the last record"
    assert [a.ended for a in goodput.attempts] == [False, True]


def test_an_attempt_that_was_killed_early_reached_what_the_next_one_found():
    first, _, _, *rest = KILLED_AND_RESUMED
    attempts = read_attempts([first, *rest])
    assert (attempts[0].first_step, attempts[0].last_step) == (0, 20)
    assert compute_goodput(attempts).seconds["lost"] == 0.0


@pytest.mark.parametrize("damage", [{"seconds": None}, {"time": 5}, {"step": None}])
def test_a_damaged_record_is_an_error_of_its_file(damage):
    with pytest.raises(ValueError):
        read_attempts([KILLED_AND_RESUMED[0] | damage])


def test_phases_follow_one_another():
    time = [0.0]
    clock = PhaseClock(lambda: time[0])
    phases = [("compile", 2, None), ("input", 5, None), ("step", 6, None), ("input", 10, None), ("step", 11, "step")]
    for phase, until, count_as in [*phases, ("save", 15, None)]:
        time[0] = until
        clock.begin(phase, count_as)
    assert clock.seconds == {"start": 2.0, "compile": 3.0, "input": 1.0, "step": 9.0}


def test_records_of_checkpoints_lose_no_step(tmp_path):
    clock = PhaseClock()
    clock.checkpoint(5, None)  # nothing is recorded yet: the run has no directory
    clock.open(tmp_path, 5)
    clock.record(9)
    clock.checkpoint(7, "no room")
    clock.checkpoint(8, None)
    records = [json.loads(line) for line in (tmp_path / PHASES).read_text().splitlines()]
    assert [(r["event"], r["step"], r.get("checkpoint"), r.get("reason")) for r in records] == [
        ("start", 5, None, None), ("save-failed", 9, 7, "no room"), ("saved", 9, 8, None),
    ]  # fmt: skip
    assert read_attempts(records)[0].last_step == 9, "what is lost is counted from the steps that were done"


def test_a_run_records_its_phases_and_the_report_shows_them(tmp_path):
    suite = TrainerSuite()
    suite.run(tmp_path / "run", max_steps=3)
    suite.run(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / PHASES).read_text().splitlines()]
    assert [(r["event"], r["step"]) for r in records if r["event"] in ("start", "end")] == [
        ("start", 0), ("end", 3), ("start", 3), ("end", 5),
    ]  # fmt: skip
    assert [r["checkpoint"] for r in records if r["event"] == "saved"][-1] == 5
    assert {"start", "restore", "compile", "step", "save"} <= records[-1]["seconds"].keys()
    page = render(read_run(tmp_path / "run"))
    assert "Goodput" in page
    assert "2 attempts" in page
    assert "steps 3 to 5" in page


def test_incidents_are_escaped_and_damaged_lines_are_reported(tmp_path):
    TrainerSuite().run(tmp_path / "run")
    incident = {"time": "t", "rule": "hang", "message": "<b>no progress</b>"}
    (tmp_path / "run/watchdog.jsonl").write_text(json.dumps(incident) + '\n{"time": "t", "ru')
    run = read_run(tmp_path / "run")
    page = render(run)
    assert "&lt;b&gt;no progress" in page
    assert "watchdog.jsonl: ignored 1 damaged line" in page
    (tmp_path / "run" / PHASES).write_text('{"attempt": 3}\n')
    assert any(PHASES in note for note in read_run(tmp_path / "run").notes)
