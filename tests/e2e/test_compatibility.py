"""Runs of earlier versions still open, and unchanged programs still compile to the same code."""

import json
import shutil

import jax
import pytest

from support import program_hashes
from support.cli_runs import axlearn, metrics
from support.paths import TESTS

FIXTURES = TESTS / "fixtures"
PROGRAMS = json.loads((FIXTURES / "programs.json").read_text()).get(jax.__version__, {})
QUICK = {"quickstart@1", "llama2-7b@data=2,fsdp=2,tensor=2", "qwen3-30b-a3b@1", "llama2-7b+lora@1"}


def test_an_older_run_generates_and_resumes_with_equal_losses(tmp_path, monkeypatch):
    home = tmp_path / "run_of_llama"
    shutil.copytree(FIXTURES / "run_of_llama", home)
    monkeypatch.chdir(home)
    expected = {m["step"]: m for m in metrics(home / "run") if "loss" in m}
    words = axlearn("generate", "run", "--prompt", "A config ", "--max-tokens", "24").stdout
    assert words == (home / "generated.txt").read_text()

    shutil.rmtree(home / "run/checkpoints/20")
    shutil.move(home / "run/metrics.jsonl", home / "earlier.jsonl")
    axlearn("train", "run/config.yaml", "--run-dir", "run")
    steps = {m["step"]: m for m in metrics(home / "run") if "loss" in m}
    assert sorted(steps) == list(range(11, 21))
    for step, values in steps.items():
        for value in ("loss", "grad_norm", "learning_rate"):
            assert values[value] == pytest.approx(expected[step][value], rel=1e-5), (step, value)


@pytest.mark.fast_cases("llama2-7b@data=2,fsdp=2,tensor=2")
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in PROGRAMS])
def test_a_program_is_what_it_was(case):
    assert program_hashes.fingerprints(case) == PROGRAMS[case]


def test_programs_of_this_jax_are_known():
    names = json.loads((FIXTURES / "programs.json").read_text())
    assert jax.__version__ in names, "scripts/make_compatibility_fixtures.py programs adds them"
    assert set(program_hashes.cases()) >= set(names[jax.__version__])
