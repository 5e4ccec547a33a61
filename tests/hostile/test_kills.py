"""Runs that are killed at seeded moments resume bit for bit.

`python -m support.random_kills --kills 20` makes all 240; here each shape has a sample.
"""

import pytest

from support.random_kills import MOMENTS, SHAPES, kill_many, trace

SAMPLE, SAMPLE_OF_ORBAX = 3, 7
"""Kills of each shape; those of Orbax reach the moments of saves, reads and restores."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_kills_leave_no_trace(shape, tmp_path):
    sample = SAMPLE_OF_ORBAX if shape.startswith("orbax") else SAMPLE
    rows = list(kill_many(shape, sample, tmp_path))
    assert len(rows) == sample
    assert [row["trace"] for row in rows] == [""] * sample
    assert {"compile", "step"} <= {row["moment"] for row in rows} <= set(MOMENTS)


def test_a_loss_that_differs_is_a_trace(tmp_path):
    for name, last in (("whole", 3.0), ("run", 3.0000002)):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": {step}, "loss": {loss}}}' for step, loss in ((1, 5.0), (2, last))]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    assert trace(tmp_path / "whole", tmp_path / "whole") == ""
    assert "(2, 3.0000002), (2, 3.0)" in trace(tmp_path / "run", tmp_path / "whole")
