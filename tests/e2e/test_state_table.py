"""Everything that keeps state under everything that moves it: the table in docs/layers.md, cell by cell."""

import pytest

from axlearn_core import train
from axlearn_core.errors import CheckpointError
from support import state_table, toy_models

QUICK = {
    ("router-bias", "remat"),
    ("dropout", "scan"),
    ("batch-norm", "export"),
    ("amax", "accumulation"),
}
"""Each kind at least once: the other cells are among the slow tests."""
CELLS = [
    pytest.param(kind, column, id=f"{kind}-{column}", marks=() if (kind, column) in QUICK else pytest.mark.slow)
    for kind in state_table.KINDS
    for column in state_table.COLUMNS
]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that registers the layers of `stateful_models.py`, so that runs with them can be opened."""
    info = tmp_path / "site/stateful-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stateful\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
    )
    components = (
        "batch-norm = support.stateful_models:BatchNorm\nwatched-linear = support.stateful_models:WatchedLinear\n"
    )
    (info / "entry_points.txt").write_text(f"[axlearn.components]\n{components}")
    monkeypatch.syspath_prepend(str(info.parent))


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("kind", "column"), CELLS)
def test_a_cell_holds(kind, column, tmp_path):
    with toy_models.quick_to_compile():
        state_table.check(kind, column, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ("plain", "amax", r"missing: variables\.decoder\.\S+\.amax float32"),
        ("amax", "plain", r"unexpected: variables\.decoder\.\S+\.amax float32"),
    ],
)
def test_a_run_is_not_continued_with_other_variables(before, now, problem, tmp_path):
    place = tmp_path / "run"
    with toy_models.quick_to_compile():
        state_table.run(before, place, 1)
        files = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
        with pytest.raises(CheckpointError, match="contains a run with a different config; nothing was written"):
            state_table.run(now, place, 2)
        with pytest.raises(CheckpointError, match=problem) as error:
            train(state_table.experiment(now), steps=2, run_dir=place, allow_drift=True)
    assert error.value.exit_code == 2
    assert str(error.value).count("\n    fix: ") == 1
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == files


def test_the_page_has_the_table():
    text = state_table.DOCS.read_text()
    assert text == state_table.page(text), "uv run python tests/e2e/state_table.py writes it"
