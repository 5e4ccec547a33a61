"""Each rule, on a clock of its own."""

import random

import pytest

from axlearn_plugins_runtime.watchdog_rules import Hang, LossSpike, SlowSteps, StarvedInput


class Clock:
    """Tells rules what happens, and collects what they find."""

    def __init__(self, rule):
        self.rule, self.now, self.step, self.alerts = rule.build(), 0.0, 0, []

    def phase(self, phase, seconds, every=1.0):
        self._keep(self.rule.begin(phase, self.step, self.now))
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + every, end)
            self._keep(self.rule.check(self.now))
        self.step += phase == "step"

    def _keep(self, message):
        if message is not None:
            self.alerts.append((self.now, message))


def test_a_hang_is_found_soon_after_its_limit_and_once():
    clock = Clock(Hang.Config(seconds=60))
    clock.phase("restore", 50)
    clock.phase("compile", 900)
    for _ in range(5):
        clock.phase("input", 0.1)
        clock.phase("step", 2)
    began = clock.now
    clock.phase("input", 600)
    assert len(clock.alerts) == 1
    at, message = clock.alerts[0]
    assert 60 < at - began <= 120
    assert "phase 'input' after step 5" in message
    assert "limit is 60.0 s" in message


def test_half_an_hour_of_slow_steps_below_the_limit_raises_no_alarm():
    random.seed(1)
    clock = Clock(Hang.Config(seconds=60))
    clock.phase("compile", 100)
    while clock.now < 1900:
        clock.phase("input", random.uniform(0, 0.2))
        clock.phase("step", 55 if random.random() < 0.05 else 2)
        if clock.step % 50 == 0:
            clock.phase("save", random.uniform(1, 40))
    assert not clock.alerts


def test_slow_steps_below_the_limit_do_not_raise_it():
    clock = Clock(Hang.Config(seconds=60))
    for number in range(50):
        clock.phase("step", 55 if number % 10 == 5 else 2)
    assert not clock.alerts
    began = clock.now
    clock.phase("step", 600)
    ((at, _),) = clock.alerts
    assert at - began <= 62


def test_the_limit_follows_steps_that_are_long():
    clock = Clock(Hang.Config(seconds=60, factor=5))
    for _ in range(3):
        clock.phase("step", 70)
    assert clock.rule.limit("step") == 350
    clock.phase("step", 340)
    assert not clock.alerts


@pytest.mark.parametrize("phase", ["step", "input", "evaluate", "save"])
@pytest.mark.parametrize("usual", [2, 30, 58])
def test_a_hang_is_found_within_twice_the_limit_whatever_is_usual(phase, usual):
    clock = Clock(Hang.Config(seconds=60, save_seconds=60))
    for _ in range(3):
        clock.phase(phase, usual)
    assert not clock.alerts
    began = clock.now
    clock.phase(phase, 600)
    ((at, _),) = clock.alerts
    assert 60 < at - began <= 120 - 60 / 8


def test_a_save_has_a_limit_of_its_own():
    clock = Clock(Hang.Config(seconds=60, save_seconds=300))
    for _ in range(5):
        clock.phase("step", 2)
        clock.phase("save", 0.1)
    clock.phase("save", 290)  # the last one waits until everything is written
    assert not clock.alerts
    began = clock.now
    clock.phase("save", 600)
    ((at, message),) = clock.alerts
    assert 300 < at - began <= 302
    assert "phase 'save'" in message
    clock = Clock(Hang.Config(seconds=60, save_seconds=300))
    clock.phase("step", 2)
    began = clock.now
    clock.phase("save", 600)
    assert [300 < at - began <= 302 for at, _ in clock.alerts] == [True]


@pytest.mark.parametrize("phase", ["restore", "compile", "step", "evaluate"])
def test_what_happens_first_may_take_long(phase):
    clock = Clock(Hang.Config(seconds=60, start_seconds=600))
    clock.phase(phase, 500)
    assert not clock.alerts
    clock = Clock(Hang.Config(seconds=60, start_seconds=600))
    clock.phase(phase, 700)
    assert len(clock.alerts) == 1


def test_a_long_phase_that_ended_is_no_history_of_the_next_one():
    clock = Clock(Hang.Config(seconds=60))
    clock.phase("input", 1)
    clock.phase("input", 300)
    clock.phase("step", 1)
    assert clock.rule.limit("input") == 60


def test_steps_that_become_slow_are_found_and_then_usual():
    clock = Clock(SlowSteps.Config(factor=3, steps=3))
    for _ in range(20):
        clock.phase("step", 1)
    for _ in range(2):
        clock.phase("step", 5)
    clock.phase("step", 1)
    clock.phase("step", 1)
    assert not clock.alerts, "two slow steps are not three"
    for _ in range(4):
        clock.phase("step", 5)
    assert len(clock.alerts) == 1
    assert "the last 3 steps (up to step " in clock.alerts[0][1]
    assert "took up to 5 s; a step usually takes 1 s" in clock.alerts[0][1]


def test_evaluation_and_saving_make_no_step_slow():
    clock = Clock(SlowSteps.Config(factor=3, steps=1))
    for i in range(40):
        clock.phase("input", 0.1)
        clock.phase("step", 1)
        if i % 4 == 3:
            clock.phase("evaluate", 30)
            clock.phase("save", 30)
    assert not clock.alerts


def test_starved_devices_are_told_from_a_slow_input_that_is_hidden():
    hidden = Clock(StarvedInput.Config(steps=10))
    starved = Clock(StarvedInput.Config(steps=10))
    for _ in range(30):
        hidden.phase("input", 0.7, every=0.1)
        hidden.phase("step", 0.3, every=0.1)  # the rest of the wait is for the devices
        starved.phase("input", 1.0, every=0.1)
        starved.phase("step", 0.01, every=0.1)
    assert not hidden.alerts
    assert len(starved.alerts) >= 2
    assert "99% of the time in the last 10 steps" in starved.alerts[0][1]


def test_a_loss_that_spikes():
    rule = LossSpike.Config(steps=2).build()
    random.seed(3)
    messages = [rule.observe(step, {"loss": 5 - step / 100 + random.gauss(0, 0.05)}) for step in range(200)]
    assert not any(messages), "a falling noisy loss"
    assert rule.observe(200, {"loss": 9.0}) is None
    assert "9.5 at step 201, 2 steps above" in rule.observe(201, {"loss": 9.5})
    assert rule.observe(202, {}) is None
    assert rule.observe(203, {"loss": float("nan")}) is None
