import pytest

from axlearn_plugins_tpu.kernels import tokamax
from support.needs import reason


@pytest.fixture
def library():
    if unavailable := tokamax.unavailable_reason():
        pytest.skip(f"{reason('tokamax')} ({unavailable})")
