import pytest

from axlearn_plugins_tpu.kernels import tokamax


@pytest.fixture
def library():
    if reason := tokamax.unavailable_reason():
        pytest.skip(reason)
