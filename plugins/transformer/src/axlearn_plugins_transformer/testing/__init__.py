"""Conformance suites for the slots and the layers of this plugin.

They follow the style of `axlearn_testing` and need pytest.
"""

import pytest

# before they are imported
pytest.register_assert_rewrite(f"{__name__}.kv_cache", f"{__name__}.recurrent")

from axlearn_plugins_transformer.testing.kv_cache import KVCacheSuite  # noqa: E402
from axlearn_plugins_transformer.testing.recurrent import RecurrentSuite  # noqa: E402

__all__ = ["KVCacheSuite", "RecurrentSuite"]
