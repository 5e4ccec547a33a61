"""Estimates of an engine from the times of its steps."""

import pytest

from axlearn_plugins_serving import measure
from axlearn_plugins_serving.contracts import Request
from axlearn_plugins_serving.measure import DURATION_SCALE, SUBMIT_SECONDS, Meter
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import Part, SchedulerOutput


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: Clock.now)
    return Clock


def plan(prompt_tokens=0):
    state = RequestState(Request(id="a", prompt=(1,)), seed=0, arrival=0, limit=1)
    parts = [Part(state, 0, 1, True, True)]
    return SchedulerOutput(parts + ([Part(state, 0, prompt_tokens, True, False)] if prompt_tokens else []))


def read(meter, clock, plan, ends):
    with meter.time_runner():
        clock.now = max(clock.now, ends)
    meter.record_read(plan)
    meter.record_step(0.0)


def run(meter, clock, plans, seconds):
    """Run steps, each planned in 0.01 s as late as possible. The last step has just started."""
    previous, ends = None, clock.now
    for one, duration in zip(plans, seconds, strict=True):
        if previous is not None:
            clock.now += meter.spare_seconds(previous) + 0.01
        meter.record_plan(waited=False)
        meter.record_submit(previous)
        if previous is not None:
            read(meter, clock, previous, ends)
        previous, ends = one, clock.now + duration
    return previous


def test_a_step_is_planned_shortly_before_the_one_before_ends(clock):
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5] * 6)
    expected = DURATION_SCALE * 0.5 - SUBMIT_SECONDS - 0.01
    assert meter.spare_seconds(last) == pytest.approx(expected)
    clock.now += 0.2
    assert meter.spare_seconds(last) == pytest.approx(expected - 0.2)
    clock.now += 0.5
    assert meter.spare_seconds(last) == 0.0


def test_the_shortest_step_of_a_shape_counts(clock):
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5, 0.5, 0.3, 0.5, 0.5, 0.5])
    assert meter.spare_seconds(last) == pytest.approx(DURATION_SCALE * 0.3 - SUBMIT_SECONDS - 0.01)
    assert meter.spare_seconds(plan(prompt_tokens=100)) == 0.0, "no such step was measured"


def test_planning_that_takes_longer_begins_earlier(clock):
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5] * 6)
    for _ in range(8):
        begun = clock.now
        clock.now += meter.spare_seconds(last) + 0.03
        meter.record_plan(waited=False)
        meter.record_submit(last)
        read(meter, clock, last, begun + 0.5)
    assert meter.spare_seconds(last) == pytest.approx(DURATION_SCALE * 0.5 - SUBMIT_SECONDS - 0.03)


def test_a_step_that_ended_unseen_is_no_measure(clock):
    """Its time would include idle time, which would delay later plans even more."""
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5] * 6)
    ends = clock.now + 0.5
    clock.now += meter.spare_seconds(last) + 0.2
    meter.record_plan(waited=False)
    meter.record_submit(last)
    read(meter, clock, last, ends)
    assert meter.spare_seconds(last) == 0.0


def test_nobody_waits_for_a_step_whose_requests_have_ended(clock):
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5] * 6)
    assert meter.spare_seconds(last) > 0
    last.parts[0].state.finished = True
    assert meter.spare_seconds(last) == 0.0


def test_plans_that_waited_for_results_do_not_count(clock):
    meter = Meter()
    last = run(meter, clock, [plan()] * 6, [0.5] * 6)
    before = meter.spare_seconds(last)
    ends = clock.now + 0.5
    clock.now += before
    read(meter, clock, last, ends)
    meter.record_plan(waited=True)
    meter.record_submit(None)
    assert meter.spare_seconds(last) == pytest.approx(before)
