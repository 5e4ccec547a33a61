"""Conformance suites for the slots of this plugin.

They follow the style of `axlearn_testing` and need pytest.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.latent_cache")  # before it is imported

from axlearn_plugins_transformer.attention_variants.testing.latent_cache import LatentCacheSuite  # noqa: E402

__all__ = ["LatentCacheSuite"]
