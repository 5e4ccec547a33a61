import math

import attrs
import pytest

from axlearn_core.config import patch
from axlearn_plugins_rl.engine_sizes import ENGINE, fit_engine, limit_context


def sizes(config):
    runner = config.runner
    return runner.max_rows, runner.chunk, runner.row_buckets, runner.chunk_buckets


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((32, 16, 17), (512, 8, (128,), (16,))),
        ((64, 64, 17), (512, 8, (128,), (16,))),
        ((2, 3, 17), (6, 8, (1,), (2,))),
        ((64, 16, 1025), (127, 32, (31,), (4,))),
        ((64, 16, 8193), (64, 32, (16,), (4,))),
    ],
)
def test_the_rows_are_the_rollouts_that_fit(batch, expected):
    examples, group_size, context = batch
    config = patch(ENGINE, {"runner.max_context": 8193})
    fitted = fit_engine(limit_context(config, context), examples=examples, group_size=group_size)
    assert sizes(fitted) == expected
    assert fitted.runner.max_context == context
    assert fitted.scheduler.joint_prompt_tokens == 512 + expected[0]


@pytest.mark.parametrize(("max_tokens", "steps"), [(1, 1), (2, 1), (4, 3), (100, 4), (None, 4)])
def test_several_tokens_are_decoded_in_one_dispatch(max_tokens, steps):
    fitted = fit_engine(limit_context(ENGINE, 17), examples=32, group_size=16, max_tokens=max_tokens)
    assert (fitted.runner.decode_steps, fitted.hold_seconds) == (steps, math.inf)


def test_sizes_of_the_user_stay():
    settings = {
        "runner.max_rows": 24,
        "runner.chunk": 16,
        "runner.row_buckets": (3,),
        "runner.chunk_buckets": (2,),
        "runner.decode_steps": 2,
        "scheduler.joint_prompt_tokens": 100,
        "hold_seconds": 0.01,
    }
    config = patch(ENGINE, settings)
    fitted = fit_engine(limit_context(config, 17), examples=32, group_size=16)
    assert fitted == attrs.evolve(config, runner=attrs.evolve(config.runner, max_context=17))
