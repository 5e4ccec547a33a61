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


def test_sizes_of_the_user_stay():
    settings = {
        "runner.max_rows": 24,
        "runner.chunk": 16,
        "runner.row_buckets": (3,),
        "runner.chunk_buckets": (2,),
        "scheduler.joint_prompt_tokens": 100,
    }
    config = patch(ENGINE, settings)
    fitted = fit_engine(limit_context(config, 17), examples=32, group_size=16)
    assert fitted == attrs.evolve(config, runner=attrs.evolve(config.runner, max_context=17))
