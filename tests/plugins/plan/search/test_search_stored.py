"""The shipped layouts against layouts that a search compiled and `benchmarks/layout_search.py --store` stored."""

import json

import pytest

from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.search import rank
from support.benchmark_scripts import load_benchmark
from support.paths import ROOT

STORED = json.loads((ROOT / "benchmarks/results/layouts.json").read_text("utf-8"))
TRAININGS = [(t["model"], t["target"]) for t in STORED]
TOLERANCE = 1.01
"""Of layouts whose times differ by less, the one of less memory may ship: no prediction is as exact as that."""


@pytest.fixture(scope="module")
def layout_search():
    return load_benchmark("layout_search")


def shipped(layout_search, model, target):
    resolved = resolve(Request.from_arguments(model, target=target))
    return layout_search.layout_of(resolved.config, resolved.machine.devices)


def slower_than_the_best(layout, rows):
    """Return the slowdown against the best compiled layout. Fail if the layout was not compiled or does not fit."""
    own = [r for r in rows if r["layout"] == layout]
    assert own, "the shipped layout was never compiled: run benchmarks/layout_search.py --store, and check the best"
    assert own[0]["fits"]
    return own[0]["seconds"] / min(r["seconds"] for r in rows if r["fits"])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "target"), TRAININGS)
def test_what_ships_is_as_good_as_what_a_search_compiled(layout_search, model, target):
    rows = next(t["layouts"] for t in STORED if (t["model"], t["target"]) == (model, target))
    assert len(rows) > 3
    assert slower_than_the_best(shipped(layout_search, model, target), rows) <= TOLERANCE


@pytest.mark.slow
def test_nine_of_ten_memory_estimates_are_within_five_percent():
    misses = {}
    for training in STORED:
        space = rank.Space(Request.from_arguments(training["model"], target=training["target"]), ())
        estimates = {r.choice.words: r.estimate.total / 2**30 for r in space.rank_layouts()}
        for row in training["layouts"]:
            if (words := tuple(row["words"])) in estimates:
                misses[training["target"], words] = estimates[words] / row["gib"] - 1
    assert len(misses) >= 50
    far = {words: miss for words, miss in misses.items() if abs(miss) > 0.05}
    assert len(far) <= 0.1 * len(misses), far


@pytest.mark.slow
def test_a_slower_layout_and_one_that_was_not_compiled_are_noticed(layout_search):
    model, target = TRAININGS[0]
    rows = STORED[0]["layouts"]
    layout = shipped(layout_search, model, target)
    faster = [{**rows[0], "seconds": rows[0]["seconds"] / 1.2, "layout": {**layout, "microbatches": 64}}]
    assert slower_than_the_best(layout, [*rows, *faster]) > TOLERANCE
    with pytest.raises(AssertionError, match="never compiled"):
        slower_than_the_best({**layout, "mesh": {"data": 3}}, rows)
