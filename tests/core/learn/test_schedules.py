import jax
import numpy as np
import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError
from axlearn_core.learn import Constant, Cosine, Linear, WarmupStableDecay

PEAK = 1e-2


def values(schedule, steps, max_steps=100):
    instance = jax.jit(check(schedule).build(max_steps=max_steps))
    return [float(instance(step)) / PEAK for step in steps]


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        (Constant(peak=PEAK, warmup_steps=0), (0, 50, 100), (1, 1, 1)),
        (Constant(peak=PEAK, warmup_steps=4), (0, 1, 3, 4, 99), (0.2, 0.4, 0.8, 1, 1)),
        (Cosine(peak=PEAK, warmup_steps=20, end_ratio=0.1), (0, 20, 60, 100, 120), (1 / 21, 1, 0.55, 0.1, 0.1)),
        (Cosine(peak=PEAK, warmup_steps=0, end_ratio=0.0), (0, 50, 100), (1, 0.5, 0)),
        (Linear(peak=PEAK, warmup_steps=0, end_ratio=0.2), (0, 50, 100), (1, 0.6, 0.2)),
        (
            WarmupStableDecay(peak=PEAK, warmup_steps=9, decay_steps=20, end_ratio=0.0),
            (0, 9, 50, 80, 90, 100),
            (0.1, 1, 1, 1, 0.5, 0),
        ),
        (WarmupStableDecay(peak=PEAK, warmup_steps=0, decay_steps=0), (0, 99), (1, 1)),
    ],
)
def test_values_at_the_corners(schedule, steps, expected):
    np.testing.assert_allclose(values(schedule, steps), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [Constant, Cosine, Linear, WarmupStableDecay])
def test_a_float_is_a_fraction_of_the_run(kind):
    steps = range(0, 210, 7)
    whole, part = kind(peak=PEAK, warmup_steps=20), kind(peak=PEAK, warmup_steps=0.1)
    assert values(whole, steps, 200) == values(part, steps, 200)


@pytest.mark.parametrize("kind", [Constant, Cosine, Linear, WarmupStableDecay])
def test_a_run_shorter_than_the_warm_up_still_trains(kind):
    actual = values(kind(peak=PEAK, warmup_steps=50), range(3), max_steps=3)
    assert 0 < actual[0] < actual[1] < actual[2] < 1


@pytest.mark.parametrize(
    ("schedule", "path"),
    [(Cosine(warmup_steps=1.5), "warmup_steps"), (WarmupStableDecay(decay_steps=2.0), "decay_steps")],
)
def test_a_fraction_of_more_than_the_run_is_refused(schedule, path):
    with pytest.raises(ConfigError, match=path):
        check(schedule)
