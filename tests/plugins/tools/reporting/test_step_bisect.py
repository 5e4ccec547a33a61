"""The first step that diverges: the search over files, over steps that are run again, and over real runs."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.learn import AdamW
from axlearn_plugins_tools.reporting import step_bisect
from axlearn_plugins_tools.reporting.comparison import open_run
from axlearn_plugins_tools.reporting.rerun import CannotRerun, Sketches, StepRecord, Stretch
from axlearn_plugins_tools.reporting.step_bisect import Interval, bound_by_checkpoints, find_divergence, find_step
from axlearn_plugins_tools.reporting.step_bisect_text import to_json, to_text
from support import api_runs
from support.written_runs import LOCK, record, write_run


def sketches(value):
    return Sketches(("params.a", "params.b"), np.asarray([1, int(1000 * value)]), np.full((2, 8), value), np.ones(2))


def stretch(start, values, **changes):
    """Steps whose loss and parameter `b` are the values. `changes` has other losses, batches or parameters by step."""
    steps = []
    for step, value in enumerate(values[1:], start + 1):
        loss, batch, array = (changes.get(name, {}).get(step, value) for name in ("loss", "batch", "array"))
        steps.append(StepRecord(step, {"loss": loss}, f"batch {batch}", f"file {batch}", sketches(array)))
    return Stretch(start, sketches(values[0]), steps)


BASE = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("second", "step", "cause"),
    [
        (stretch(4, BASE, batch={6: 9}), 6, "data"),
        (stretch(4, BASE, loss={7: 4.5}), 7, "scalars"),
        (stretch(4, BASE, array={5: 2.5}), 5, "update"),
        (stretch(4, [1.5, *BASE[1:]]), 5, "parameters"),
        (stretch(4, BASE, loss={7: float("nan")}), 7, "scalars"),
    ],
)
def test_the_first_cause_in_the_first_step_is_named(second, step, cause):
    divergence = find_divergence([stretch(4, BASE), second], None, 0.0)
    assert divergence is not None
    assert (divergence.step, divergence.cause) == (step, cause)


def test_equal_steps_do_not_diverge():
    assert find_divergence([stretch(4, BASE), stretch(4, BASE)], None, 0.0) is None


def test_differences_within_the_noise_do_not_count():
    near = stretch(4, BASE, loss={6: 3.0003, 7: 4.4})
    changed = stretch(4, BASE, loss={6: 3.0001})
    divergence = find_divergence([stretch(4, BASE), near], "loss", 1e-6, changed)
    assert divergence is not None
    assert divergence.step == 7
    [reading] = divergence.scalars
    assert reading.relative > reading.noise >= 1e-6
    without = find_divergence([stretch(4, BASE), near], "loss", 1e-6)
    assert without is not None
    assert without.step == 6


@pytest.fixture
def runs(tmp_path):
    """Two runs of the same program. Their records differ at step 8, and their checkpoints from step 6 on."""

    def write(name, value, loss):
        arrays = {step: {"params.a": np.full(2, value * (step >= 6), np.float32)} for step in (2, 4, 6, 8)}
        return open_run(
            write_run(tmp_path / name, records=[record(1), record(4), record(8, loss=loss)], checkpoints=arrays)
        )

    return write("a", 1, 0.5), write("b", 2, 0.7)


@pytest.fixture
def reads(monkeypatch):
    """The steps whose arrays are read. Arrays differ if the hashes of their files do."""
    steps = []

    def differences(first, second, step):
        steps.append(step)
        return iter([object()])

    monkeypatch.setattr(step_bisect, "iter_differences", differences)
    return steps


def test_checkpoints_bound_the_step_by_binary_search(runs, reads):
    first, second = runs
    interval = bound_by_checkpoints(first, second, Interval(3, 8, ("loss",)), lowers_end=True)
    assert interval == Interval(4, 6, ("checkpoint",))
    assert reads == [6], "equal hashes need no reads"
    rounding = bound_by_checkpoints(first, second, Interval(3, 8, ("loss",)), lowers_end=False)
    assert rounding == Interval(4, 8, ("loss",))


def search(runs, **options):
    calls = []

    def run_again(run, start, end, sizes=None):
        calls.append((run.uri.rpartition("/")[2], start, end))
        changes = {"loss": {6: 9.0}} if run is runs[1] else {}
        return stretch(start, BASE[: end - start + 1], **changes)

    return find_step(*runs, run_again=run_again, **options), calls


def test_steps_are_run_again_from_the_nearest_common_checkpoint(runs, reads):
    result, calls = search(runs)
    assert calls == [("a", 4, 6), ("b", 4, 6)]
    assert result.exact
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.cause, result.start) == (6, "scalars", 4)
    text = to_text(result)
    assert "the runs diverge at step 6: its scalars differ first" in text
    assert "the same batch: file 3.0" in text
    assert json.loads(json.dumps(to_json(result), allow_nan=False))["step"] == 6


def test_noise_is_measured_if_the_programs_differ(runs, reads, tmp_path):
    (tmp_path / "b/run.lock.json").write_text(json.dumps(LOCK | {"hlo_fingerprint": "f1"}))
    runs = runs[0], open_run(tmp_path / "b")
    result, calls = search(runs)
    assert not result.exact
    assert [name for name, *_ in calls] == ["a", "b", "a"]
    assert result.reruns == 3
    assert [name for name, *_ in search(runs, tolerance=1e-3)[1]] == ["a", "b"]
    assert [name for name, *_ in search(runs, max_reruns=2)[1]] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"max_reruns": 1}, "no steps were run again"), ({"max_steps": 1}, "--steps 2 runs them again")],
)
def test_limits_leave_an_interval(runs, reads, options, says):
    result, calls = search(runs, **options)
    assert calls == []
    assert result.divergence is None
    assert "diverge after step 4 and at step 6 at the latest" in to_text(result)
    assert says in to_text(result)


def test_steps_that_cannot_be_run_again_leave_an_interval(runs, reads):
    def refuse(run, start, end, sizes=None):
        raise CannotRerun("the loop does more than training steps")

    result = find_step(*runs, run_again=refuse)
    assert result.ended == "the loop does more than training steps"
    assert result.differs


def test_steps_that_do_not_reproduce_the_records_are_noted(runs, reads):
    result = find_step(*runs, run_again=lambda run, start, end, sizes=None: stretch(start, BASE), metric="loss")
    assert result.divergence is None
    assert result.ended == "the runs agree when their steps are run again here"
    assert any("does not reproduce its records at step 8: loss 0.5 in the records" in note for note in result.notes)


def test_a_metric_that_steps_do_not_report_is_refused(runs, reads):
    with pytest.raises(RequestError, match="unknown metric of both runs 'los'\n    did you mean: loss"):
        find_step(*runs, metric="los")


def bisect(*words, code):
    result = CliRunner().invoke(cli, ["config", "bisect", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_has_exit_code_one_for_equal_runs(runs):
    result = bisect(runs[0], runs[0], "--over", "steps", code=1)
    assert "do not differ" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--over", "steps", "--seeds", "3"], "--seeds needs --over configs"),
        (["--tolerance", "0.1"], "--tolerance needs --over steps"),
        (["--over", "step"], "is not one of 'configs', 'steps'"),
        (["--over", "steps", "--metric", "los"], "did you mean: loss"),
    ],
)
def test_options_of_the_other_search_are_refused(runs, words, says):
    assert says in bisect(*runs, *words, code=2).stderr


def test_a_run_that_does_not_exist_is_refused_over_steps(runs):
    assert "is not a run directory" in bisect(runs[0], "none", "--over", "steps", code=2).stderr


@pytest.mark.slow
def test_a_setting_changed_in_the_middle_is_found_between_two_records(tmp_path):
    settings = api_runs.SETTINGS | {"log_every_steps": 8, "checkpointer.every_steps": 4, "checkpointer.keep_last": None}
    ax.train("quickstart", set=settings, steps=4, run_dir=tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ax.train("quickstart", set=settings, steps=8, run_dir=tmp_path / "a")
    changed = settings | {"learner.optimizer": AdamW(learning_rate=0.02)}
    ax.train("quickstart", set=changed, steps=8, run_dir=tmp_path / "b", allow_drift=True)
    lines = []
    result = find_step(open_run(tmp_path / "a"), open_run(tmp_path / "b"), progress=lines.append)
    assert result.interval.equal == result.start == 4, lines
    assert result.divergence is not None
    assert result.divergence.step == 5
    assert result.divergence.cause == "scalars"
    assert result.divergence.same_batch
    assert "learning_rate" in [r.name for r in result.divergence.scalars if r.is_clear]
    assert not result.divergence.before
    assert not [note for note in result.notes if "reproduce" in note]
