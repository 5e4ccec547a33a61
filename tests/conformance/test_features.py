"""Every installed feature passes its suite, on every installed experiment and with every other feature."""

import pytest

from axlearn_core.plugins.registry import registry
from axlearn_testing import FeatureSuite, find_dropped
from axlearn_testing.dropped import feature_text
from support import feature_sets, toy_models

# The other experiments have the same parts; tests/e2e/test_feature_pairs.py tests them, as slow tests.
_experiments = tuple(e.name for e in registry().entries("experiments") if e.name not in toy_models.PUBLISHED)
_names = [e.name for e in registry().entries("features")]
for _i, _feature in enumerate(_names):
    _name = f"Test{_feature.title().replace('-', '')}"
    _later = tuple(_names[_i + 1 :])  # each pair once, because the suite tries both orders
    _suite = type(_name, (FeatureSuite,), {"name": _feature, "others": _later, "experiments": _experiments})
    # tests/e2e/test_feature_pairs.py tests the pairs, too.
    _slow = pytest.mark.slow_cases("test_no_feature_drops_another", "test_order_of_features_does_not_matter")
    globals()[_name] = _slow(_suite)


@pytest.mark.slow
def test_no_feature_of_a_set_drops_another():
    """The sets contain every legal pair. The slow tests try each pair by itself, on all experiments."""
    quickstart = registry().experiment("quickstart")
    for names in feature_sets.read():
        dropped = find_dropped(quickstart, *map(feature_text, names))
        assert not dropped, "\n".join(map(str, dropped))
