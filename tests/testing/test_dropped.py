"""`find_dropped` finds features that drop the effect of another one, and accepts all other pairs."""

import pytest

from axlearn_core.plugins.registry import registry
from axlearn_testing.dropped import add_fewest_needs, feature_text, find_dropped, find_dropped_in_turn
from support import dropping_features
from support.dropping_features import PLANTED


@pytest.fixture
def planted(install):
    install("planted-features", points=dropping_features.points())


@pytest.fixture
def quickstart(planted):
    return registry().experiment("quickstart")


def test_every_feature_that_drops_another_is_caught(quickstart):
    assert len(PLANTED) == 15
    for name, (_, victim, path) in PLANTED.items():
        dropped = find_dropped_in_turn(quickstart, victim, name)
        assert path in [d.effect.path for d in dropped], name
        assert {d.feature for d in dropped} == {victim.partition(":")[0]}, name
        assert f"the effect of {victim.partition(':')[0]} is lost, and no feature declares it" in str(dropped[0])


def test_the_same_changes_that_drop_nothing_pass(quickstart):
    for name, (_, victim, _) in PLANTED.items():
        assert find_dropped_in_turn(quickstart, victim, f"{name}:careful=true") == (), name
        assert find_dropped_in_turn(quickstart, f"{name}:careful=true", victim) == (), name


def test_features_in_one_request(quickstart):
    (dropped,) = find_dropped(quickstart, "drop-sinks", "ema", "sinks", "expert-parallel")
    assert (dropped.feature, dropped.effect.path) == ("sinks", "model.decoder.layer.attention")
    assert find_dropped(quickstart, "drop-sinks:careful=true", "ema", "sinks", "expert-parallel") == ()


def test_an_example_needs_no_feature_that_another_one_makes_unnecessary(quickstart):
    method, moe, mask = (feature_text(name) for name in ("dapo", "moe", "sampling-mask"))
    assert add_fewest_needs(quickstart, mask) == (feature_text("grpo"), mask)
    assert add_fewest_needs(quickstart, method, mask) == (method, mask)
    assert add_fewest_needs(quickstart, method, "router-replay") == (moe, method, "router-replay")
    assert find_dropped_in_turn(quickstart, method, mask) == ()


def test_a_needed_feature_may_replace_what_it_declares(quickstart):
    assert find_dropped_in_turn(quickstart, feature_text("chat"), "sampling-mask") == ()
