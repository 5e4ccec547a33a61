"""Schedule-free AdamW against optax's own, in evaluation and through a resumed run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free_adamw, schedule_free_eval_params

from axlearn_core.config import patch
from axlearn_core.learn import Constant, Learner
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import open_weights
from axlearn_plugins_tools.optimizers.schedule_free import ScheduleFree
from axlearn_testing import LearnerSuite
from support.cli_runs import arguments, axlearn, losses


class TestTheLearner(LearnerSuite):
    config = Learner.Config(optimizer=ScheduleFree(learning_rate=0.05))


def test_it_is_optax_s_and_evaluates_with_the_average():
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones((3,))}
    instance = Learner.Config(optimizer=ScheduleFree(learning_rate=0.1, weight_decay=0.0), max_grad_norm=None).build(
        max_steps=9
    )
    theirs = schedule_free_adamw(0.1)
    state, other, params_here = instance.init(params), theirs.init(params), params
    expected = params
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x + i), params)
        params_here, state, _ = jax.jit(instance.update)(grads, state, params_here, jnp.float32(1))
        updates, other = theirs.update(grads, other, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params_here, expected)
    averages = instance.evaluation_params(state, params_here)
    average = schedule_free_eval_params(other, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), averages, average)
    assert not np.allclose(averages["w"], params_here["w"], rtol=1e-3)


def test_the_average_weighs_each_step_by_a_power_of_its_rate():
    def average(power):
        rate = Constant(peak=0.5, warmup_steps=4)
        optimizer = ScheduleFree(learning_rate=rate, weight_lr_power=power, weight_decay=0.0).build(max_steps=9)
        params = {"w": jnp.ones((3,))}
        state = optimizer.init(params)
        for i in range(4):
            updates, state = optimizer.update({"w": jnp.cos(params["w"] + i)}, state, params)
            params = optax.apply_updates(params, updates)
        return schedule_free_eval_params(state, params)["w"]

    assert not np.allclose(average(0.0), average(2.0), rtol=1e-3)


def test_the_feature_keeps_the_peak_and_leaves_the_decay():
    cfg = resolve("llama2-7b", with_=["schedule-free:learning_rate=0.01"]).config
    warmup = resolve("llama2-7b").config.learner.optimizer.learning_rate.warmup_steps
    assert cfg.learner.optimizer == ScheduleFree(learning_rate=Constant(peak=0.01, warmup_steps=warmup))
    other = patch(cfg, {"learner.optimizer.b1": 0.95})
    assert resolve(other, with_=["schedule-free"]).config == other


@pytest.mark.slow
def test_a_run_evaluates_with_the_average_and_resumes_bit_identically(tmp_path):
    settings = ("learner.optimizer={type: schedule-free, learning_rate: 0.01}",)
    axlearn(*arguments(tmp_path / "whole", steps=5, settings=settings))
    axlearn(*arguments(tmp_path / "parts", steps=3, settings=settings))
    axlearn(*arguments(tmp_path / "parts", steps=5, settings=settings))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    weights = open_weights(tmp_path / "whole")
    paths = list(weights.specs())
    arrays = weights.checkpoint.arrays
    iterates = {p: next(a for a in arrays if ".z." in a and a.endswith(f".z.{p}")) for p in paths}
    read = weights.checkpoint.read(
        {a: jax.ShapeDtypeStruct(tuple(arrays[a].shape), arrays[a].dtype, sharding=None)
         for p in paths for a in (iterates[p], f"params.{p}")}
    )  # fmt: skip
    for path, value in weights.read().items():
        trained, iterate = read[f"params.{path}"], read[iterates[path]]
        np.testing.assert_allclose(value, (trained - (1 - 0.9) * iterate) / 0.9, rtol=1e-5, atol=1e-6)
        if trained.ndim > 1:
            assert not np.array_equal(value, trained)
