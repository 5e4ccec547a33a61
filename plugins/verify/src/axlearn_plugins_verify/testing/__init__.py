"""Conformance suite for properties, like the suites in `axlearn_testing`.

It needs pytest.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.property_suite")  # before the import

from axlearn_plugins_verify.testing.property_suite import PropertySuite  # noqa: E402

__all__ = ["PropertySuite"]
