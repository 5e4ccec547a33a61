"""The property `settings` compares each setting with another value."""

import pytest

import axlearn_core as ax
from axlearn_plugins_verify.properties.settings import Settings, changed_settings
from support import proof_cases

SMALL = ("model.decoder.hidden_dim=16", "input.sequence_length=16", "input.batch_size=4")
POSITION = "model.decoder.layer.attention.position"


def case(*settings):
    return proof_cases.case("quickstart", (), (*SMALL, *settings))


@pytest.mark.parametrize("shift", [0, 2])
def test_a_setting_of_zero_is_compared_with_another_number(shift):
    proof_case = case(f"{POSITION}={{type: query-temperature, interval: 8, shift: {shift}}}")
    changed = dict(changed_settings(proof_case.config))
    assert changed[f"{POSITION}.shift"].model.decoder.layer.attention.position.shift != shift
    assert Settings().check(proof_case).holds


def test_a_setting_without_an_effect_is_named():
    outcome = Settings().check(case("model.decoder.layer.attention.qk_norm_last=true"))
    assert not outcome.holds
    assert (outcome.difference.layer, outcome.difference.tensor) == ("decoder.layer.attention", "qk_norm_last")


def test_equal_nodes_of_an_alternate_are_compared_once():
    config = ax.resolve("gemma4-e4b").config
    paths, every = ([path for path, _ in changed_settings(config, repeated=repeated)] for repeated in (False, True))
    attention = "model.decoder.layer.attention."
    assert {path for path in paths if path.startswith(f"{attention}first.0.")}, "a local layer"
    assert not {path for path in paths if path.startswith(f"{attention}first.1.")}, "another local layer"
    assert {path for path in every if path.startswith(f"{attention}first.1.")}
    assert {*paths} < {*every}
