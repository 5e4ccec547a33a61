"""The layouts that ship against those that a search compiled and `benchmarks/layout_search.py --store` kept."""

import importlib.util
import json
from pathlib import Path

import pytest

from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.search import rank

ROOT = Path(__file__).parents[4]
STORED = json.loads((ROOT / "benchmarks/results/layouts.json").read_text("utf-8"))
TRAININGS = [(t["model"], t["target"]) for t in STORED]
TOLERANCE = 1.01
"""Of layouts whose times differ by less, the one of less memory may ship: no prediction is as exact as that."""


@pytest.fixture(scope="module")
def layout_search():
    spec = importlib.util.spec_from_file_location("layout_search", ROOT / "benchmarks/layout_search.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shipped(layout_search, model, target):
    resolved = resolve(Request.of(model, target=target))
    return layout_search.layout_of(resolved.config, resolved.machine.devices)


def slower_than_the_best(layout, rows):
    """By which factor, of what was compiled; an assertion error where the layout was not, or does not fit."""
    own = [r for r in rows if r["layout"] == layout]
    assert own, (
        "the layout that ships was never compiled: benchmarks/layout_search.py --store, and look at what is best"
    )
    assert own[0]["fits"]
    return own[0]["seconds"] / min(r["seconds"] for r in rows if r["fits"])


@pytest.mark.parametrize(("model", "target"), TRAININGS)
def test_what_ships_is_as_good_as_what_a_search_compiled(layout_search, model, target):
    rows = next(t["layouts"] for t in STORED if (t["model"], t["target"]) == (model, target))
    assert len(rows) > 3
    assert slower_than_the_best(shipped(layout_search, model, target), rows) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("model", "target"), TRAININGS)
def test_the_estimate_of_memory_is_that_of_what_a_search_compiled(model, target):
    space = rank.Space(Request.of(model, target=target), ())
    rows = next(t["layouts"] for t in STORED if (t["model"], t["target"]) == (model, target))
    estimates = {r.choice.words: r.estimate.total / 2**30 for r in space.ranked()}
    unstaged = {
        tuple(r["words"]): r["gib"] for r in rows if "pipeline:" not in " ".join(r["words"])
    }  # others: test_stages.py
    misses = [abs(estimates[words] / gib - 1) for words, gib in unstaged.items() if words in estimates]
    assert len(misses) >= 5
    assert sum(miss <= space.fitted.error for miss in misses) >= 0.9 * len(misses), misses


def test_a_slower_layout_and_one_that_was_not_compiled_are_noticed(layout_search):
    model, target = TRAININGS[0]
    rows = STORED[0]["layouts"]
    layout = shipped(layout_search, model, target)
    faster = [{**rows[0], "seconds": rows[0]["seconds"] / 1.2, "layout": {**layout, "microbatches": 64}}]
    assert slower_than_the_best(layout, [*rows, *faster]) > TOLERANCE
    with pytest.raises(AssertionError, match="never compiled"):
        slower_than_the_best({**layout, "mesh": {"data": 3}}, rows)
