"""`axlearn runs compare`: its output, page and exit codes."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from support.written_runs import LOCK, record, write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "same")
    records = [record(1), record(2, loss=1.5), record(4)]
    write_run(tmp_path / "b", rate=0.2, seed=7, records=records, lock=LOCK | {"python": "3.12.0"})
    return tmp_path


def compare(*words, code):
    result = CliRunner().invoke(cli, ["runs", "compare", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


def test_equal_runs_have_exit_code_zero(runs):
    assert "The runs are equal" in compare("a", "same", code=0)
    assert json.loads(compare("a", "same", "--json", code=0))["equal"] is True


def test_the_text_has_the_summary_and_the_json_all_parts(runs):
    assert "The runs start differently: 1 config value, 1 seed, 1 version." in compare("a", "b", code=1)
    data = json.loads(compare("a", "b", "--json", "--tolerance", "0.9", code=1))
    assert data["config"][0]["second"] == 0.2
    assert data["scalars"]["first_step_beyond_tolerance"] is None


def test_the_page_has_the_summary_and_escapes_values(runs):
    lock = LOCK | {"versions": {"jax": "<script>"}}
    write_run(runs / "c", lock=lock)
    compare("a", "c", "--report", "out/page.html", code=1)
    page = (runs / "out/page.html").read_text("utf-8")
    assert "The runs start differently: 1 version." in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a", "none"], "none is not a run directory: it does not exist"),
        (["a", "smae"], "did you mean: same?"),
        (["a"], "Missing argument 'RUN_B|URI'"),
        (["a", "b", "--tolerance", "-1"], "-1.0 is not in the range"),
        (["a", "b", "--step", "3", "--no-arrays"], "--step 3 selects the arrays"),
        (["a", "b", "--step", "3"], "the runs have no common checkpoint at step 3"),
        (["a", "nowhere://b"], "no plugin supports"),
    ],
)
def test_bad_input_is_one_error(runs, words, says):
    assert says in compare(*words, code=2)


def test_a_damaged_file_is_one_error(runs):
    (runs / "b/run.lock.json").write_text("{")
    assert "b/run.lock.json is damaged" in compare("a", "b", code=2)


@pytest.mark.slow
def test_jax_is_not_imported_unless_arrays_are_compared(runs):
    script = (
        "import sys\nfrom axlearn_core.cli.main import cli\n"
        "try:\n    cli(['runs', 'compare', 'a', 'b'])\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=runs, capture_output=True)
