"""`benchmarks/forced_calls.py` with a tiny model."""

import json
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_required_calls_are_compared_with_free_answers(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/forced_calls.py"), "--model", "toy", "--rounds", "2"]
    command += ["--requests", "4", "--out", str(tmp_path / "out.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "required / free" in result.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["ratios"]) == 2
