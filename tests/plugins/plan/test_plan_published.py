"""Published models have plans at their published sizes, on hardware that fits them."""

import pytest

from axlearn_core.plugins.registry import registry
from support.benchmark_scripts import load_benchmark

published = load_benchmark("published_plans")

TOYS = {"gpt-oss-toy", "quickstart", "qwen3-next-toy", "vit-tiny"}


def test_every_published_experiment_is_in_the_table():
    names = {entry.name for entry in registry().entries("experiments")}
    planned = {*published.TARGETS, *published.TPU_TARGETS}
    assert planned | published.UNPLANNED == names - TOYS
    assert not planned & published.UNPLANNED


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "target"), [*published.TARGETS.items(), *published.TPU_TARGETS.items()])
def test_it_fits(experiment, target):
    result = published.plan(experiment, target)
    assert "error" not in result, result["error"]
    assert result["fits"], published.line(experiment, target, result)
    # Use causal FLOPs: masked pairs are not computed, so the full count may exceed 1 if little is recomputed.
    assert 0 < result["roofline_mfu_causal"] < 1
