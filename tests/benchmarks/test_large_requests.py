"""The benchmark of large requests, with a few of them."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_large_requests_are_refused_and_others_are_served(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks/large_requests.py"), "--requests", "4", "--at-once", "2"]
    command += ["--context", "256", "--kinds", "chat,tokens", "--out", str(out)]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"], "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), result.stderr  # the exit code depends on how busy this machine is
    kinds = json.loads(out.read_text())["kinds"]
    assert {name: figures["statuses"] for name, figures in kinds.items()} == {
        "idle": {},
        "chat": {"400": 4},
        "tokens": {"400": 4},
    }
    assert all(figures["health_ms"]["p50"] > 0 and figures["stream_gap_ms"]["p50"] > 0 for figures in kinds.values())
