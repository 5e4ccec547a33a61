"""Conformance suites of the slots that this plugin defines, as those of `axlearn_testing`; they need pytest."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.latent_cache")  # before it is imported

from axlearn_plugins_transformer.attention_variants.testing.latent_cache import LatentCacheSuite  # noqa: E402

__all__ = ["LatentCacheSuite"]
