"""Runs that are killed at seeded moments resume bit for bit.

`python -m support.random_kills --kills 20` makes all 240, and `python -m support.rollout_kills --kills 20` those of runs on
rollouts; here each shape has a sample.
"""

import pytest

from support import rollout_kills
from support.random_kills import MOMENTS, SHAPES, Shape, kill_many

SAMPLE, SAMPLE_OF_ORBAX = 3, 7
"""Kills of each shape; those of Orbax reach the moments of saves, reads and restores."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_kills_leave_no_trace(name, tmp_path):
    shape, sample = SHAPES[name], SAMPLE_OF_ORBAX if name.startswith("orbax") else SAMPLE
    rows = list(kill_many(shape, sample, tmp_path))
    assert len(rows) == sample
    assert [row["trace"] for row in rows] == [""] * sample
    assert {"compile", "step"} <= {row["moment"] for row in rows} <= set(MOMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", rollout_kills.SHAPES)
def test_kills_lose_no_rollout_and_use_none_twice(name, tmp_path):
    rows = list(kill_many(rollout_kills.SHAPES[name], SAMPLE, tmp_path))
    assert [row["trace"] for row in rows] == [""] * SAMPLE
    assert {"rollout", "reward"} <= {row["moment"] for row in rows} <= set(rollout_kills.MOMENTS)


def test_a_loss_that_differs_is_a_trace(tmp_path):
    for name, last in (("whole", 3.0), ("run", 3.0000002)):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": {step}, "loss": {loss}}}' for step, loss in ((1, 5.0), (2, last))]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    trace = Shape("plain").trace
    assert trace(tmp_path / "whole", tmp_path / "whole") == ""
    assert "(2, 3.0000002), (2, 3.0)" in trace(tmp_path / "run", tmp_path / "whole")
