"""The text and the JSON of a comparison of two runs."""

import json
import math

import attrs
import pytest

from axlearn_plugins_tools.reporting.comparison import ArrayDifference, Checkpoints, compare_runs, open_run
from axlearn_plugins_tools.reporting.comparison_text import pair_texts, summarize, to_json, to_text
from support.written_runs import LOCK, record, write_run


@pytest.fixture
def comparison(tmp_path):
    first = open_run(write_run(tmp_path / "a"))
    records = [record(1), record(2, loss=1.5), record(4), record(5)]
    lock = LOCK | {"python": "3.12.0"}
    return compare_runs(first, open_run(write_run(tmp_path / "b", rate=0.2, seed=7, records=records, lock=lock)))


def test_the_summary_is_in_the_order_of_the_differences(comparison):
    assert summarize(comparison) == [
        "The runs start differently: 1 config value, 1 seed, 1 version. The config values do not change the computation.",
        "Their scalars first differ at step 2; step 1 is identical (loss).",
        "A ends at step 4, B at step 5.",
        "The runs have no common checkpoint.",
    ]
    text = to_text(comparison)
    lines = text[text.index("in order:") : text.index("\n\nconfig:")].splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [
        ["before", "step", "1"], ["before", "step", "1"], ["before", "step", "1"], ["step", "2", "scalars"],
    ]  # fmt: skip
    assert "A  0.1  --set learner.rate=0.2" in text
    assert "experiment toy" not in text, "only the last source is shown"


def test_the_tolerance_separates_rounding_from_divergence(comparison):
    scalars = attrs.evolve(comparison.scalars, tolerance=0.9, differences=())
    assert "identical up to step 4" in " ".join(summarize(attrs.evolve(comparison, scalars=scalars)))
    [loss] = comparison.scalars.differences
    scalars = attrs.evolve(scalars, differences=(attrs.evolve(loss, beyond=None),))
    assert "No difference exceeds the tolerance of 0.9" in " ".join(
        summarize(attrs.evolve(comparison, scalars=scalars))
    )


def test_long_tables_are_cut_and_json_has_every_row(comparison):
    arrays = tuple(ArrayDifference(f"params.x{i}", 1.0 / (i + 1), 1, 4, "f[4]", "f[4]") for i in range(12))
    arrays = (*arrays, ArrayDifference("params.nan", math.inf, 1, 4, "f[4]", "f[4]"))
    checkpoints = Checkpoints(steps=(2, 4), differing=(4,), step=4, arrays=20, differences=arrays)
    comparison = attrs.evolve(comparison, checkpoints=checkpoints)
    text = to_text(comparison)
    assert "arrays at checkpoint 4: 13 of 20 differ" in text
    assert "and 3 more (see --json)" in text
    assert "The checkpoints are equal at step 2." in text
    data = json.loads(json.dumps(to_json(comparison), allow_nan=False))
    assert len(data["checkpoints"]["differences"]) == 13
    assert data["checkpoints"]["differences"][-1]["relative"] == "inf"
    assert data["timeline"][-1]["step"] == 4
    assert data["seeds"][0]["name"] == "seed"


def test_close_numbers_are_shown_apart():
    assert pair_texts(1.0, 2.0) == ("1", "2")
    assert pair_texts(7.736876, 7.736879) == ("7.736876", "7.736879")
