"""Predicted step times: the fit, and targets without a prediction."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_plan.predict import load_measurements, log_ratio, predict, unknown_ops
from axlearn_plugins_plan.roofline import Roofline
from support.benchmark_scripts import load_benchmark

BOUND = Roofline(compute=1.0, hbm=0.2, links=0.1, network=0.1)


def test_every_step_has_a_citation_and_a_target_that_is_known():
    for step in load_measurements()[0]:
        assert step.source
        assert step.seconds > step.compute, "no step is shorter than its compute at the peak"
        assert find_machine({"trn2": "trn2-16x1", "tpu-v5p": "tpu-v5p-8"}.get(step.target, f"{step.target}-8x1"))


def test_the_fit_is_near_the_steps():
    steps, model = load_measurements()
    assert np.median([abs(math.expm1(log_ratio(model, s))) for s in steps]) <= 0.12


def test_the_kept_fit_is_that_of_the_kept_steps(benchmark_module):
    steps, model = load_measurements()
    targets = list(dict.fromkeys(s.target for s in steps))
    platforms = list(dict.fromkeys(s.platform for s in steps))
    again = benchmark_module.fit(list(steps), targets, platforms)
    assert again.efficiency == pytest.approx(dict(model.efficiency), rel=0.01)
    assert again.scale == pytest.approx(model.scale, rel=0.02)


@pytest.fixture(scope="module")
def benchmark_module():
    return load_benchmark("step_times")


def test_a_target_with_steps_has_a_prediction_within_an_interval():
    actual = predict(find_machine("h100-8x32"), BOUND)
    assert actual is not None
    assert actual.low < actual.seconds < actual.high
    assert actual.seconds > BOUND.compute
    assert any("2507.05411" in s for s in actual.sources)


@pytest.mark.parametrize("name", ["h200-8x1", "tpu-v6e-256", "cpu-8"])
def test_a_target_without_steps_has_none(name):
    assert predict(find_machine(name), BOUND) is None


def test_more_chips_take_longer_and_experts_too():
    small, large = (predict(find_machine(f"h100-8x{n}"), BOUND) for n in (32, 512))
    experts = predict(find_machine("h100-8x32"), BOUND, grouped=True)
    assert small.seconds < large.seconds
    assert small.seconds < experts.seconds


def test_ops_that_no_known_step_ran_have_no_upper_bound():
    names = ("attention", "linear_attention", "linear_attention")
    assert unknown_ops(SimpleNamespace(op=SimpleNamespace(name=name)) for name in names) == ("linear_attention",)
    measured, other = (predict(find_machine("h100-8x32"), BOUND, unknown=ops) for ops in ((), ("linear_attention",)))
    assert measured is not None
    assert other is not None
    assert other.seconds == measured.seconds
    assert other.high is None
    assert other.low == BOUND.compute < measured.low


def test_no_step_is_shorter_than_what_it_sends_and_moves():
    slow = Roofline(compute=0.1, hbm=9.0, links=0.0, network=0.0)
    assert predict(find_machine("h100-8x32"), slow).seconds == 9.0
    sends = Roofline(compute=0.1, hbm=0.0, links=0.0, network=7.0)
    assert predict(find_machine("h100-8x32"), sends).seconds == 7.0
