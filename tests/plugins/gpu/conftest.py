import importlib.util

import pytest

from axlearn_plugins_gpu.kernels import mosaic, tokamax
from axlearn_plugins_gpu.kernels.interpreter import interpret
from support.needs import reason


@pytest.fixture(autouse=True)
def compiler():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip(reason("jax_cuda12_plugin"))


@pytest.fixture
def library():
    if unavailable := tokamax.unavailable_reason():
        pytest.skip(f"{reason('tokamax')} ({unavailable})")


@pytest.fixture
def first_kernel(monkeypatch):
    """Pretend that this process has not compiled a Mosaic kernel. The test does not compile one."""
    first = {}
    monkeypatch.setattr(mosaic, "_first", first)
    return first


@pytest.fixture
def interpreted(library):
    """Run kernels in Pallas' interpreter."""
    with interpret():
        yield
