"""Copies of model directories that a test may change."""

import shutil

from support.paths import HF_FIXTURES


def model_copy(name, tmp_path):
    """Copy a fixture without its stored outputs."""
    directory = tmp_path / name
    shutil.copytree(HF_FIXTURES / name, directory)
    (directory / "expected.safetensors").unlink()
    return directory
