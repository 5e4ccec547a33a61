"""The text and the JSON of a replay."""

import json

import numpy as np

from axlearn_plugins_verify.replay import Replay
from axlearn_plugins_verify.replay.differences import ScalarDifference
from axlearn_plugins_verify.replay.document_search import Bisection
from axlearn_plugins_verify.replay.documents import Document
from axlearn_plugins_verify.replay.findings import Divergence, Finding
from axlearn_plugins_verify.replay.probes import Statistics
from axlearn_plugins_verify.replay.replay_report import SHOWN, as_json, page, text
from axlearn_plugins_verify.replay.workbench import Measure

DOCUMENT = Document(row=2, number=3, start=22, stop=31, source="data.jsonl: the line at byte 1522")


def make_replay(**fields):
    return Replay(**{"run": "runs/a", "step": 12, "start": 10, "scalars": {"loss": float("nan")}, **fields})


def test_step_without_records_is_neither_identical_nor_different():
    result = make_replay(start=0)
    assert result.identical is None
    assert "computed again from the initial state\nnothing to compare" in text(result)


def test_identical_step_names_what_was_compared():
    result = make_replay(compared_steps=(11, 12), compared_scalars=10, compared_arrays=42)
    assert "bit-identical: 10 scalars of 2 steps from 11 to 12 and 42 arrays of the checkpoint of step 12" in text(
        result
    )


def test_many_differences_are_counted():
    different = [ScalarDifference(step=12, name=f"x{i}", recorded=1.0, replayed=2.0) for i in range(SHOWN + 3)]
    shown = text(make_replay(compared_steps=(12,), compared_scalars=20, different_scalars=different))
    assert "not bit-identical: 15 of 20 scalars differ" in shown
    assert f"x{SHOWN - 1} of step 12: 1.0 recorded, 2.0 replayed" in shown
    assert f"x{SHOWN} of" not in shown
    assert "and 3 more" in shown


def test_everything_that_was_found_is_shown():
    statistics = Statistics.measure("decoder.norm", "output", np.array([[1.0, np.nan]], np.float32), (1, 2))
    finding = Finding(statistics=statistics, documents=(DOCUMENT,))
    normal = Measure(loss=2.0, norm=1.0, nonfinite=0)
    bad = Measure(loss=float("nan"), norm=float("nan"), nonfinite=2)
    bisection = Bisection(
        documents=(DOCUMENT,), whole=bad, rest=normal, usual=1.1, reruns=9, ended="the step is normal without it"
    )
    divergence = Divergence(layer="a.b", tensor="input", error=float("inf"), nonfinite=3, finite_in_shadow=True)
    result = make_replay(
        changes=("jax was 1, is 2",), nonfinite=finding, bisection=bisection, shadow="float32", divergences=(divergence,),
        probes=(statistics,), features=("ema",), feature_scalars={"loss": 2.5}, weights=("a.weight",),
    )  # fmt: skip
    lines = text(result).splitlines()
    for line in (
        "changed since the run: jax was 1, is 2",
        "with ema: loss 2.5",
        "not finite before the step: a.weight",
        "first values that are not finite: decoder.norm output: 1 of 2 values are not finite",
        "  in row 2, document 3 (positions 22 to 30): data.jsonl: the line at byte 1522",
        "first overflow: a, input of b is finite with float32, but 3 of its values are not in the run",
        "bisection: 1 document after 9 re-runs; the step is normal without it (loss 2, gradient norm 1)",
        "  microbatch 0, row 2, document 3 (positions 22 to 30): data.jsonl: the line at byte 1522",
        "decoder.norm output  1    1    1     1",
    ):
        assert line in lines
    data = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert data["bisection"]["documents"][0]["source"] == DOCUMENT.source
    assert data["nonfinite"]["documents"][0]["row"] == 2
    assert data["scalars"] == {"loss": "nan"}
    assert "the line at byte 1522" in page(result)
