import shutil

import pytest

from axlearn_plugins_cpu.kernels import library


@pytest.fixture(autouse=True)
def compiled():
    """A machine without a compiler has no library; on any other one that is not there is a defect of the build."""
    if library.missing is not None and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(library.missing)
    assert library.missing is None
