import importlib.util

import pytest

from axlearn_plugins_gpu.kernels import mosaic, tokamax
from support import gpu_op_cases


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
    with gpu_op_cases.interpreter():
        yield
