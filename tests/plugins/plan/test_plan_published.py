"""Every published model has a plan at its published size, on hardware that fits it."""

import importlib.util

import pytest

from axlearn_core.plugins.registry import registry
from support.paths import ROOT

FILE = ROOT / "benchmarks/published_plans.py"
spec = importlib.util.spec_from_file_location("published_plans", FILE)
assert spec
assert spec.loader
published = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)

TOYS = {"quickstart", "vit-tiny"}


def test_every_published_experiment_is_in_the_table():
    names = {entry.name for entry in registry().entries("experiments")}
    assert set(published.TARGETS) == names - TOYS


@pytest.mark.slow
@pytest.mark.parametrize("experiment", published.TARGETS)
def test_it_fits(experiment):
    result = published.plan(experiment)
    assert "error" not in result, result["error"]
    assert result["fits"], published.line(experiment, result)
    # Use causal FLOPs: masked pairs are not computed, so the full count may exceed 1 if little is recomputed.
    assert 0 < result["roofline_mfu_causal"] < 1
