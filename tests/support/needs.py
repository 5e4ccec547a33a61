"""Skip tests whose packages are missing, with the command that installs the packages and runs the test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.paths import ROOT, TESTS

INSTALL = {
    "fastapi": "uv run --with 'ray[serve]' pytest",
    "lm_eval": "uv run --group lm-eval pytest",
    "peft": "uv run --group parity pytest",
    "skyrl_gym": "uv run --group environments pytest",
    "textarena": "uv run --group environments pytest",
    "torch": "uv run --group parity pytest",
    "transformers": "uv run --group parity pytest",
}
"""Package -> start of the command. `ALL_PACKAGES` installs the others."""
ALL_PACKAGES = "uv run --all-packages pytest"


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # a parent package is missing
        return True


def _test_file() -> str:
    """Return the test file, or the folder of the conftest, that called this module."""
    frame = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(TESTS) and file.stem.startswith(("test_", "conftest")):
            return str((file if file.stem != "conftest" else file.parent).relative_to(ROOT))
        frame = frame.f_back
    return "tests"


def reason(*packages: str) -> str:
    """Return the reason to skip a test without these packages: their names, and how to run the test."""
    command = next((INSTALL[package] for package in packages if package in INSTALL), ALL_PACKAGES)
    return f"needs {' and '.join(packages)}: {command} {_test_file()}"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if one of the packages is missing."""
    return pytest.mark.skipif(any(map(_is_missing, packages)), reason=reason(*packages))


def require(package: str) -> ModuleType:
    """Import a package. Skip the test, or the module that calls this, if it is missing."""
    return pytest.importorskip(package, reason=reason(package))
