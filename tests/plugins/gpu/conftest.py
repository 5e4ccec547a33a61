import importlib.util

import kernel_cases
import pytest

from axlearn_plugins_gpu.kernels import mosaic, tokamax


@pytest.fixture(autouse=True)
def compiler():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("needs XLA's GPU compiler")


@pytest.fixture
def library():
    if reason := tokamax.missing():
        pytest.skip(reason)


@pytest.fixture
def first_kernel(monkeypatch):
    """As if this process had compiled none in Mosaic: it compiles none in this test."""
    first = {}
    monkeypatch.setattr(mosaic, "_first", first)
    return first


@pytest.fixture
def interpreted(library):
    """Kernels run in Pallas' interpreter."""
    with kernel_cases.interpreter():
        yield
