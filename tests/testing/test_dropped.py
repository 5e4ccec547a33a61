"""`find_dropped` finds features that drop the effect of another one, and accepts all other pairs."""

import pytest

from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_testing import FeatureSuite
from axlearn_testing.dropped import find_dropped, find_dropped_in_turn
from support import dropping_features
from support.dropping_features import PLANTED


@pytest.fixture
def planted(install):
    install("planted-features", points=dropping_features.points())


@pytest.fixture
def quickstart(planted):
    return registry().experiment("quickstart")


@pytest.mark.parametrize("name", PLANTED)
def test_a_feature_that_drops_another_is_caught(name, quickstart):
    _, victim, path = PLANTED[name]
    dropped = find_dropped_in_turn(quickstart, victim, name)
    assert path in [d.effect.path for d in dropped]
    assert {d.feature for d in dropped} == {victim.partition(":")[0]}
    assert "no feature declares it in `replaces`" in str(dropped[0])


@pytest.mark.parametrize("name", PLANTED)
def test_the_same_change_that_drops_nothing_passes(name, quickstart):
    _, victim, _ = PLANTED[name]
    assert find_dropped_in_turn(quickstart, victim, f"{name}:careful=true") == ()
    assert find_dropped_in_turn(quickstart, f"{name}:careful=true", victim) == ()
