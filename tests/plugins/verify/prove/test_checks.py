"""Checks in several processes: their order, a process that ends early, and configs that another process cannot read."""

import threading

import pytest

from axlearn_plugins_verify.prove import checks, proof
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.checks import Check, Checks
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.helper_process import HelperProcess
from support import proof_cases

NAMES = ("causality", "gradients", "settings", "updates")
SIZES = {"model.decoder.hidden_dim": 16, "input.sequence_length": 8, "input.batch_size": 4}
SMALL = tuple(f"{path}={size}" for path, size in SIZES.items())


class Part:
    """A property that always holds, or that is skipped."""

    summary = "one number equals another"

    def __init__(self, reason=None, ready=None):
        self.reason, self.ready = reason, ready

    def skip_reason(self, case):
        return self.reason

    def check(self, case):
        assert self.ready is None or self.ready.wait(60)
        return Outcome(error=0.0, tolerance=1.0, compared="two numbers")


class Helper:
    """A helper that ends after a number of checks."""

    def __init__(self, count):
        self.count, self.calls, self.closed, self.ready = count, [], False, threading.Event()

    def check(self, number, name):
        if len(self.calls) == self.count:
            self.ready.set()
            return None
        self.calls.append((number, name))
        return Check(name=name, summary=Part.summary, seed=10 + number, status=checks.HOLDS, reason="helper")

    def close(self):
        self.closed = True


def run(monkeypatch, helper, chosen, jobs=2, has_time=lambda: True):
    """Return the checks as (seed, name), and those in the order of their reports."""
    monkeypatch.setattr(checks, "PROPERTIES_PER_PROCESS", 1)
    monkeypatch.setattr(HelperProcess, "start", lambda cases: helper)
    first, reported = Case(None, seed=10), []
    cases = (first, first.with_seed(11))
    result = Checks(cases, chosen, has_time=has_time, progress=reported.append).run(jobs)
    assert [*result] == reported
    return [(check.seed, check.name) for check in result], result


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_every_check_runs_once_even_if_a_helper_ends(monkeypatch, count):
    """Properties in this process wait for the end of the helper: after its first seed, or during the second."""
    helper = Helper(count)
    names, result = run(monkeypatch, helper, {name: Part(ready=helper.ready) for name in NAMES})
    assert len(helper.calls) == count
    assert names == [(seed, name) for seed in (10, 11) for name in NAMES]
    assert all(check.status == checks.HOLDS for check in result)
    by_helper = [(check.seed - 10, check.name) for check in result if check.reason == "helper"]
    assert sorted(by_helper) == sorted(helper.calls)
    assert helper.closed


def test_a_skipped_property_has_one_check(monkeypatch):
    chosen = {"one": Part("it does not apply"), "other": Part()}
    names, _ = run(monkeypatch, None, chosen)
    assert names == [(10, "one"), (10, "other"), (11, "other")]


def test_no_check_starts_after_the_time_limit(monkeypatch):
    helper = Helper(100)
    names, result = run(monkeypatch, helper, {name: Part() for name in NAMES}, has_time=lambda: False)
    assert names == [(10, name) for name in NAMES]
    assert {check.status for check in result} == {checks.NOT_RUN}
    assert not helper.calls


def test_few_properties_start_no_process(monkeypatch):
    def start(cases):
        raise AssertionError("a process was started")

    monkeypatch.setattr(HelperProcess, "start", start)
    first = Case(None)
    chosen = {name: Part() for name in NAMES}
    assert len(Checks([first], chosen, has_time=lambda: True, progress=lambda check: None).run(8)) == 4


def test_a_process_checks_properties_like_this_one(monkeypatch):
    monkeypatch.setattr(checks, "PROPERTIES_PER_PROCESS", 2)
    answers, check = [], HelperProcess.check
    monkeypatch.setattr(HelperProcess, "check", lambda self, *args: answers.append(check(self, *args)) or answers[-1])
    results = [proof.prove("quickstart", set=SIZES, only=NAMES, jobs=jobs) for jobs in (1, 2)]
    alone, together = (
        [(c.name, c.seed, c.status, c.outcome and c.outcome.compared) for c in result.checks] for result in results
    )
    assert alone == together
    assert answers, "the helper has checked properties"
    assert all(isinstance(answer, Check) for answer in answers)
    assert {answer.name for answer in answers} < {*NAMES}


def test_a_config_that_another_process_cannot_read_starts_none():
    config = proof_cases.case("quickstart", (), SMALL).config
    assert HelperProcess.start([Case(config, target=lambda: None)]) is None
    assert HelperProcess.start([Case(config, target="__main__.Target")]) is None


def test_a_helper_that_has_ended_returns_none(capfd):
    helper = HelperProcess(b"not a case")
    try:
        assert helper.check(0, "causality") is None
        assert helper.check(0, "causality") is None
    finally:
        helper.close()
    errors = capfd.readouterr().err
    assert "note: the second process of the proof ended (UnpicklingError" in errors
    assert "Traceback" not in errors
