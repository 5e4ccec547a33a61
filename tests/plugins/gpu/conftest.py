import pytest


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="needs XLA's GPU compiler: axlearn-plugins-gpu[compile]")
