import shutil
from pathlib import Path

import pytest

import axlearn_plugins_cpu
from axlearn_plugins_cpu.kernels import library

FOLDER = Path(axlearn_plugins_cpu.__file__).parent


@pytest.fixture(autouse=True)
def compiled():
    """Skip without a compiler. On any other machine, a missing or outdated library is an error."""
    if library.unavailable_reason is not None and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(
            f"needs a C++ compiler and `uv sync --reinstall-package axlearn-plugins-cpu`: {library.unavailable_reason}"
        )
    assert library.unavailable_reason is None
    newest = max(path.stat().st_mtime for path in (FOLDER / "native").iterdir())
    (built,) = FOLDER.glob("_native*.so")
    assert built.stat().st_mtime > newest, "uv sync --all-packages --reinstall-package axlearn-plugins-cpu"
