"""Conformance suites for the slots of this plugin.

They follow the style of `axlearn_testing` and need pytest.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.kv_cache")  # before it is imported

from axlearn_plugins_transformer.testing.kv_cache import KVCacheSuite  # noqa: E402

__all__ = ["KVCacheSuite"]
