"""Published methods by name."""

import pytest

from axlearn_core.config import check
from axlearn_core.errors import RequestError
from axlearn_plugins_rl.policy_gradient.kl_penalty import KlPenalty
from axlearn_plugins_rl.presets import PRESETS, build_preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_differ(name):
    preset = build_preset(name)
    check(preset.objective)
    check(preset.advantage)
    others = [build_preset(other) for other in PRESETS if other != name]
    assert preset not in others


def test_the_weight_of_the_divergence_can_be_set():
    assert build_preset("rloo", kl=0.3).objective.penalty.estimator == "k1", "the other settings do not change"
    assert build_preset("rloo", kl=0.3).objective.penalty.coefficient == 0.3
    assert build_preset("dapo", kl=0.3).objective.penalty == KlPenalty.Config(coefficient=0.3)
    assert build_preset("grpo", kl=0).objective.penalty is None


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(RequestError, match=r"nearest: .*grpo"):
        build_preset("gpro")
