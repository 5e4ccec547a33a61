"""The benchmark of servers, with a tiny model on the CPU: every path that a GPU takes but the GPU."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT


def serving(*words):
    command = [sys.executable, str(ROOT / "benchmarks/serving.py"), *map(str, words)]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_a_dry_run_of_a_target(target, tmp_path):
    result = serving("--dry-run", "--target", target, "--out", tmp_path / "figures.json")
    assert result.returncode == 0, result.stderr
    assert f"| {target} | axlearn |" in result.stdout
    for title in ("TPOT at batch 1 / one read of the weights", "FLOP/s of a prompt / peak"):
        line = next(line for line in result.stdout.splitlines() if title in line)
        assert float(line.split("|")[2]) > 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["size"]["dtype"] == "bfloat16"
    assert written["rounds"][0]["axlearn"]["loaded"]["failed"] == 0
    assert (
        written["rounds"][0]["axlearn"]["loaded"]["cached_prompt_tokens"] == 0
    )  # of the requests that warm up nothing is left
    assert "| prompt tokens that were cached, most | 0.0% |" in result.stdout


@pytest.mark.slow
def test_a_target_that_nobody_knows():
    result = serving("--dry-run", "--target", "h1000")
    assert result.returncode == 1
    assert "h100" in result.stderr
