"""Steps of runs of all shapes that the kill tests use are replayed bit by bit, from the command line."""

import json

import attrs
import pytest

from support import cli_runs, random_kills

STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("name", random_kills.SHAPES)
def test_each_shape_is_bit_identical(name, tmp_path):
    shape = attrs.evolve(random_kills.SHAPES[name], steps=STEPS)
    run, folder = tmp_path / "run", tmp_path / "folder"
    folder.mkdir()
    assert not random_kills.finish(shape, run, run, folder)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    process = cli_runs.axlearn("replay", str(run), "--step", str(STEPS), "--json", fresh=True)
    result = json.loads(process.stdout)
    assert result["identical"] is True
    assert 0 < result["start"] < STEPS
    assert result["compared"]["arrays"] > 20
    assert result["compared"]["scalars"] >= 4
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
