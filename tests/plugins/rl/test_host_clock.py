import gc

from axlearn_plugins_rl import host_clock
from axlearn_plugins_rl.host_clock import YOUNG_OBJECTS, HostClock, frozen_heap


def test_the_clock_counts_until_a_step_is_dispatched(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(host_clock.time, "perf_counter", lambda: now[0])
    clock = HostClock()
    for event, seconds in [("start", 1), ("stop", 10), ("start", 2)]:
        getattr(clock, event)()
        now[0] += seconds
    assert clock.lap() == 3
    now[0] += 4
    clock.step_dispatched(1, {})
    now[0] += 100  # an evaluation
    clock.start()
    now[0] += 5
    assert clock.lap() == 9


def test_the_clock_does_not_count_compilations(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(host_clock.time, "perf_counter", lambda: now[0])
    clock = HostClock()
    clock.start()
    now[0] += 1
    clock.phase("step", 0)
    now[0] += 1
    clock.phase("compile", 0)
    now[0] += 100
    assert clock.lap() == 2


def test_the_heap_is_frozen_during_training():
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    with frozen_heap():
        assert gc.get_freeze_count() > before
        assert gc.get_threshold() == YOUNG_OBJECTS
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, thresholds)
