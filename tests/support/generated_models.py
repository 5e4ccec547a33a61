"""Models that transformers creates and computes during the tests, if it and torch are installed."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.needs import needs
from support.paths import ROOT

SCRIPT = ROOT / "scripts/make_hf_fixtures.py"
MARKS = (
    pytest.mark.slow,
    needs("torch", "transformers"),
)

_FOLDERS: list[tempfile.TemporaryDirectory] = []


@functools.cache
def generate(name):
    """Return a folder like the fixture of this name, with other weights."""
    _FOLDERS.append(tempfile.TemporaryDirectory())  # deleted when the process ends
    to = _FOLDERS[-1].name
    subprocess.run([sys.executable, SCRIPT, "--to", to, "--seed", "1000", name], check=True, stdout=subprocess.DEVNULL)
    return Path(to) / name
