"""Conformance suites of the slots that this plugin defines, as those of `axlearn_testing`; they need pytest."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.kv_cache")  # before it is imported

from axlearn_plugins_transformer.testing.kv_cache import KVCacheSuite  # noqa: E402

__all__ = ["KVCacheSuite"]
