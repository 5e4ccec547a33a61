"""A distribution for the tests of the core."""

from pathlib import Path

import pytest

from support.toy_distribution import Install, install_toy


@pytest.fixture
def toy(install: Install) -> Path:
    """An installed distribution with two experiments, their components and some features. It imports no JAX."""
    return install_toy(install)
