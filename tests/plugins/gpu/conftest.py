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
    if reason := tokamax.unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def first_kernel(monkeypatch):
    """Pretend that this process has not compiled a Mosaic kernel. The test does not compile one."""
    first = {}
    monkeypatch.setattr(mosaic, "_first", first)
    return first


@pytest.fixture
def interpreted(library):
    """Run kernels in Pallas' interpreter."""
    with kernel_cases.interpreter():
        yield
