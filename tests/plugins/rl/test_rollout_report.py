"""The section "Rollouts" of a report, from the files of a run to HTML."""

import json

from axlearn_core.run.metric_files import METRICS, PHASES
from axlearn_plugins_rl.rollout_log import RolloutLog
from axlearn_plugins_rl.rollout_report import clock_short, draw_rollouts
from axlearn_plugins_tools.reporting.run import read_run
from support.rollout_groups import group


def make(path, *, steps=3, rollouts=True, **metrics):
    """A run directory with a reward of 0.5 in each step."""
    rows = [
        {"step": s, "loss": 0.0, "reward": 0.5, "rollout_seconds": 0.25, "step_seconds": 2.0, **metrics}
        for s in range(1, steps + 1)
    ]
    rows.append({"step": steps, "eval_reward": 0.75})
    (path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rollouts:
        log = RolloutLog.Config().build()
        log.start(path, 0)
        for step in range(1, steps + 1):
            log.write(step, [group((1.0, 1.0), number=1), group((1.0, 0.0), number=2, prompt=f"step {step} <b>&=")])
    return path


def test_the_section_shows_rewards_times_and_answers(tmp_path):
    page = draw_rollouts(read_run(make(tmp_path)))
    assert "reward over steps" in page
    assert "eval_reward" in page
    assert "rollouts and rewards</th><td>250.0 ms" in page
    assert "step, with waiting</th><td>2.00 s" in page
    assert "example 2 · step 3" in page
    assert page.index("example 2 · step 3") < page.index("example 1 · step 3"), "different rewards come first"
    assert "<summary>rollouts of step 1</summary>" in page
    assert "step 1 &lt;b&gt;&amp;=" in page
    assert "<b>" not in page


def test_a_run_without_rollouts_has_no_section(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0}\n')
    assert draw_rollouts(read_run(tmp_path)) == ""


def test_a_run_without_files_of_rollouts_says_so(tmp_path):
    page = draw_rollouts(read_run(make(tmp_path, rollouts=False)))
    assert "The run has no files of rollouts." in page
    assert "example " not in page


def test_one_file_has_no_older_rollouts(tmp_path):
    page = draw_rollouts(read_run(make(tmp_path, steps=1)))
    assert "example 2 · step 1" in page
    assert "<details>" not in page


def test_rewards_are_smoothed_from_twenty_steps_on(tmp_path):
    assert "smoothed" not in draw_rollouts(read_run(make(tmp_path, steps=19, rollouts=False)))
    assert "smoothed" in draw_rollouts(read_run(make(tmp_path, steps=20, rollouts=False)))


def test_an_error_of_a_reward_is_shown_with_its_rollout(tmp_path):
    make(tmp_path, rollouts=False)
    log = RolloutLog.Config().build()
    log.start(tmp_path, 0)
    log.write(1, [group((1.0, 0.0), errors=(1,))])
    assert "reward 0 (failed)" in draw_rollouts(read_run(tmp_path))


def test_phases_of_all_attempts_add_up(tmp_path):
    make(tmp_path)
    day = "2026-01-01T00:"
    records = [
        {
            "attempt": f"{day}{minute}:00+00:00", "time": f"{day}{minute}:59+00:00", "event": "end", "step": 3,
            "seconds": {"rollout": 30.0, "step": 10.0}, "host": "h", "pid": 1,
        }
        for minute in ("00", "05")
    ]  # fmt: skip
    (tmp_path / PHASES).write_text("".join(json.dumps(record) + "\n" for record in records))
    page = draw_rollouts(read_run(tmp_path))
    assert "75.0%" in page
    assert "25.0%" in page


def test_durations_below_a_second_are_milliseconds():
    assert [clock_short(0.0123), clock_short(1.5)] == ["12.3 ms", "1.50 s"]


def test_answers_of_all_processes_are_shown(tmp_path):
    make(tmp_path, steps=1)
    log = RolloutLog.Config().build()
    log.start(tmp_path, 1, process=1)
    log.write(1, [group((1.0, 0.0), number=3)])
    page = draw_rollouts(read_run(tmp_path))
    assert [page.count(f"example {number} · step 1") for number in (1, 2, 3)] == [1, 1, 1]
    (tmp_path / "rollouts" / "step-1.jsonl").unlink()  # it is on another machine
    assert "example 3 · step 1" in draw_rollouts(read_run(tmp_path))
