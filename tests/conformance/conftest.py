"""What these suites share."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Pairs of features are all tried in tests/e2e/test_feature_pairs.py; here, pair by pair, among the slow proofs."""
    for item in items:
        if item.name.startswith("test_the_order_with_any_other_feature") and item.path.name == "test_features.py":
            item.add_marker(pytest.mark.slow)
