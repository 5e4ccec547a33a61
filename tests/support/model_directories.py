"""Copies of model directories that a test may change."""

import json
import shutil

from support.paths import HF_FIXTURES


def model_copy(name, tmp_path):
    """Copy a fixture without its stored outputs."""
    directory = tmp_path / name
    shutil.copytree(HF_FIXTURES / name, directory)
    (directory / "expected.safetensors").unlink()
    return directory


def edit_config(directory, **changes):
    """Change keys in the `config.json` of a copy."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
