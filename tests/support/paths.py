"""Folders that tests read."""

import functools
import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
HF_FIXTURES = TESTS / "plugins/models/huggingface/fixtures"
"""A tiny model of each family, with the outputs that transformers computed."""
FIXTURES = TESTS / "fixtures"
"""Files of earlier versions."""
RUN_OF_LLAMA = TESTS / "fixtures/run_of_llama/run"
"""A run that an earlier version trained."""


@functools.cache
def python_files() -> tuple[Path, ...]:
    """Return the Python files of the repository, without those of environments and builds."""
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [n for n in folders if n != "build" and (n == ".ci" or not n.startswith("."))]
        files += [Path(folder, n) for n in names if n.endswith(".py")]
    return tuple(sorted(files))
