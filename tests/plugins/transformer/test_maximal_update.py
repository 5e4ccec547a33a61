"""The feature `mup`: its settings, its errors, and runs at the base width. `tests/conformance` has its suite."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core import compose
from axlearn_core.config import get
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.learn import ParameterRule
from axlearn_core.nn.initializers import VarianceScaling
from axlearn_plugins_transformer.width_scaling import HeadScale, WidthInitializer, WidthMultiplier, WidthRule
from support import toy_models

ADAMW = "optimizer:component=adamw"


@functools.cache
def resolve(experiment, *features):
    return toy_models.resolve(experiment, with_=features).config


def test_it_sets_initializers_multipliers_and_a_rule():
    cfg = resolve("quickstart", "mup:base_width=64,base_head_dim=16")
    assert get(cfg, "model.decoder.output_multiplier") == WidthMultiplier(base_width=64)
    assert get(cfg, "model.decoder.layer.attention.scale") == HeadScale(base_width=64, base_head_dim=16)
    assert get(cfg, "learner.rules") == (WidthRule(base_width=64),)
    init = get(cfg, "model.decoder.layer.attention.output.init")
    assert isinstance(init, WidthInitializer)
    assert init.base == VarianceScaling(scale=0.01)


def test_a_second_use_sets_the_options():
    first = resolve("quickstart", "mup:base_width=64", "freeze:pattern=decoder.embedding.**")
    second = toy_models.resolve(first, with_=["mup:base_width=32,latents=fixed"]).config
    assert get(second, "model.decoder.output_multiplier") == WidthMultiplier(base_width=32)
    assert get(second, "model.decoder.head.init").base_width == 32
    assert not isinstance(get(second, "model.decoder.head.init").base, WidthInitializer)
    frozen = ParameterRule(pattern="decoder.embedding.**", freeze=True)
    assert get(second, "learner.rules") == (WidthRule(base_width=32, latents="fixed"), frozen)


def test_the_multiplier_of_granite_is_the_factor_at_the_base_width():
    plain = toy_models.resolve("quickstart", set={"model.decoder.output_multiplier": 0.25}).config
    cfg = toy_models.resolve(plain, with_=["mup:base_width=64"]).config
    assert get(cfg, "model.decoder.output_multiplier") == WidthMultiplier(base_width=64, value=0.25)


@pytest.mark.parametrize("component", ["sgd", "adafactor"])
def test_optimizers_without_a_rule_are_refused(component):
    with pytest.raises(RequestError, match=rf"does not define.*width[\s\S]*{component}[\s\S]*fix: .*adamw"):
        resolve("quickstart", f"optimizer:component={component}", "mup:base_width=64")


def test_schedule_free_is_excluded():
    with pytest.raises(RequestError, match=r"mup[\s\S]*schedule-free|schedule-free[\s\S]*mup"):
        resolve("quickstart", "schedule-free", "mup:base_width=64")


def test_an_optimizer_that_is_set_later_is_refused_too():
    late: dict[str, Any] = {"learner.optimizer": {"type": "sgd", "learning_rate": 0.1}}
    cfg: Any = toy_models.resolve("quickstart", with_=["mup:base_width=64"], set=late).config
    with pytest.raises(ConfigError, match=r"learner\.optimizer: mup does not define"):
        compose(cfg, jax.devices()[:1])


def train_twice(cfg: Any):
    """Return the losses of two steps and the parameters after them."""
    program = compose(cfg, jax.devices()[:1])
    state, losses = program.init(0), []
    for _ in range(2):
        state, metrics = program.train_step(state, program.put(toy_models.batch()))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), (ADAMW,), ("moe", ADAMW), ("mla",)], ids=str)
def test_at_the_base_width_a_run_is_bit_identical(features):
    plain = toy_models.small("quickstart")
    width = get(plain, "model.decoder.hidden_dim")
    plain = toy_models.resolve(plain, with_=features).config
    scaled = toy_models.resolve(plain, with_=[f"mup:base_width={width}"]).config
    (losses, params), (expected, others) = train_twice(scaled), train_twice(plain)
    assert losses == expected
    assert losses[0] != losses[1]
    for path, value in others.items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


@pytest.mark.slow
def test_the_width_may_change_after_the_feature():
    """Settings are applied after features, so the factors come from the shapes."""
    cfg = toy_models.small("quickstart")
    width = get(cfg, "model.decoder.hidden_dim")
    wider = toy_models.resolve(
        cfg, with_=[f"mup:base_width={width}"], set={"model.decoder.hidden_dim": 2 * width}
    ).config
    model = get(wider, "model").build(rngs=nnx.Rngs(0))
    hidden, _ = model.hidden_states(toy_models.batch())
    assert np.sqrt(np.mean(np.square(hidden))) == pytest.approx(0.5, rel=0.01)
