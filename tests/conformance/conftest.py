"""What these suites share."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests of feature pairs as slow; tests/e2e/test_feature_pairs.py tests them all too."""
    for item in items:
        if item.name.startswith("test_the_order_with_any_other_feature") and item.path.name == "test_features.py":
            item.add_marker(pytest.mark.slow)
