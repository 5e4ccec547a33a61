import pytest

from axlearn_plugins_tpu.kernels import tokamax


@pytest.fixture
def library():
    if reason := tokamax.missing():
        pytest.skip(reason)
