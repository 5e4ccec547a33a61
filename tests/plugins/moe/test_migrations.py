"""Configs and checkpoints of the time when the bias of a sigmoid router was a parameter."""

from pathlib import Path

import numpy as np
import pytest

from axlearn_core import resolve
from axlearn_core.checkpoint import open_weights
from axlearn_core.config import find
from axlearn_core.errors import RequestError
from axlearn_core.plugins.migrations import migrate_arrays, migrate_config
from axlearn_plugins_moe.migrations import parameters_to_variables, rules_to_rates

DESCENT = {"type": "parameter-rule", "pattern": "**.router.bias", "optimizer": {"type": "sign-descent", "rate": 0.25}}
DECAY = {"type": "parameter-rule", "pattern": "**.norm.*", "weight_decay": False}


def config(*rules, **router):
    experts = {"type": "mixture-of-experts", "router": {"type": "sigmoid-router", "scale": 2.5, **router}}
    layer = {"feed_forward": {"type": "alternate", "first": [], "children": [{"type": "feed-forward"}, experts]}}
    model = {"type": "causal-lm", "decoder": {"layer": layer}}
    return {"type": "trainer", "model": model, "learner": {"type": "learner", "rules": list(rules)}}


def rate(data):
    return data["model"]["decoder"]["layer"]["feed_forward"]["children"][1]["router"].get("rate")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([DESCENT], 0.25),
        ([DECAY, {**DESCENT, "learning_rate_scale": 0.5}], 0.125),
        ([{"pattern": "decoder.**.router.bias", "freeze": True}, DECAY], 0.0),
        ([DESCENT, {"pattern": "!**.lora_*", "freeze": True}], 0.0),
        ([DESCENT, {"pattern": "**.lora_*", "freeze": True}], 0.25),
    ],
)
def test_the_rate_of_the_rules_becomes_that_of_the_router(rules, expected):
    before = config(*rules)
    after = migrate_config(before)
    assert rate(after) == expected
    assert after["learner"]["rules"] == [r for r in rules if not r["pattern"].endswith("router.bias")]
    assert before == config(*rules)
    assert rules_to_rates(after) == after


def test_configs_of_today_come_back_as_they_are():
    for data in (config(), config(DECAY, rate=0.5), {"type": "trainer"}, {"learner": {"type": "other"}}):
        assert rules_to_rates(data) is data


MAIN = "learner.optimizer.inner_states..inner_state.0.mu.decoder.norm.weight"
THIRD = "learner.optimizer.inner_states.2.inner_state.0.mu.decoder.embedding.weight"
BIAS = "decoder.layer.feed_forward.router.bias"
STORED = [MAIN, f"params.{BIAS}", f"learner.ema.{BIAS}", "params.decoder.norm.weight", "step"]


def test_arrays_move():
    expected = ["learner.optimizer.0.mu.decoder.norm.weight", f"variables.{BIAS}", "params.decoder.norm.weight", "step"]
    assert migrate_arrays(STORED, expected) == {
        f"params.{BIAS}": f"variables.{BIAS}", f"learner.ema.{BIAS}": None,
        MAIN: "learner.optimizer.0.mu.decoder.norm.weight",
    }  # fmt: skip


def test_rules_behind_the_one_that_went_have_other_numbers():
    expected = [MAIN, THIRD.replace(".2.", ".1."), f"variables.{BIAS}"]
    assert parameters_to_variables([*STORED, THIRD], expected) == {
        f"params.{BIAS}": f"variables.{BIAS}", f"learner.ema.{BIAS}": None, THIRD: THIRD.replace(".2.", ".1."),
    }  # fmt: skip


def test_parameters_of_other_modules_of_that_name_stay():
    assert parameters_to_variables(STORED, STORED) == {}
    assert parameters_to_variables(["params.router.bias"], ["params.other.bias"]) == {}


def test_the_rule_is_refused_in_requests_of_today():
    rules = [{"type": "parameter-rule", "pattern": "**.router.bias", "optimizer": {"type": "sign-descent"}}]
    with pytest.raises(RequestError, match="sign-descent"):
        resolve("quickstart", with_=["moe:router={type: sigmoid-router}"], set={"learner.rules": rules})


def test_the_rate_is_a_setting_of_the_router():
    result = resolve("quickstart", with_=["moe:router={type: sigmoid-router, rate: 0.5}"]).checked().config
    assert list(find(result, "model.**.router.rate").values()) == [0.5]
    assert result.learner.rules == ()


def test_the_weights_of_an_old_run_open():
    run = Path(__file__).parents[2] / "fixtures/run_of_sigmoid_router/run"
    weights = open_weights(run)
    assert list(find(weights.experiment, "model.**.router.rate").values()) == [0.001]
    assert weights.experiment.learner.rules == ()
    assert weights.functional.variables.keys() == {BIAS}
    bias = np.asarray(weights.read(BIAS)[BIAS]) / 0.001
    assert np.abs(bias).max() >= 1
    np.testing.assert_allclose(bias, np.round(bias), atol=1e-3)  # steps of one size
