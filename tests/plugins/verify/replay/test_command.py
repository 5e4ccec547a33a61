"""The options, the output and the exit codes of `axlearn replay`."""

import json

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_plugins_verify.replay import Replay, step_replay
from axlearn_plugins_verify.replay.differences import ScalarDifference

DIFFERENT = ScalarDifference(step=4, name="loss", recorded=1.0, replayed=float("nan"))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of `replay`, whose result has one more difference in each call."""
    calls = []

    def replay(run, *, step, progress, **options):
        calls.append((run, step, options))
        progress("computing steps 3 to 4")
        different = [DIFFERENT] * (len(calls) - 1)
        scalars = {"loss": float("nan")}
        return Replay(
            run=run, step=step, start=2, scalars=scalars, compared_steps=(4,), compared_scalars=5,
            different_scalars=different,
        )  # fmt: skip

    monkeypatch.setattr(step_replay, "replay", replay)
    return calls


def invoke(*words, code):
    result = CliRunner().invoke(cli, ["replay", *words])
    assert result.exit_code == code, result.output
    return result


def test_options_reach_the_function(calls):
    words = "runs/a --step 4 --with ema --with moe:num_experts=2 --probe a.** --shadow float32 --bisect --allow-drift --from-start"
    invoke(*words.split(), code=0)
    options = {
        "with_": ("ema", "moe:num_experts=2"), "probe": "a.**", "shadow": "float32", "bisect": True, "allow_drift": True,
        "from_start": True,
    }  # fmt: skip
    assert calls == [("runs/a", 4, options)]


def test_defaults_only_compare(calls):
    result = invoke("runs/a", "--step", "4", code=0)
    assert calls[0][2] == {
        "with_": (), "probe": None, "shadow": None, "bisect": False, "allow_drift": False, "from_start": False
    }  # fmt: skip
    assert "bit-identical: 5 scalars of step 4" in result.stdout
    assert result.stderr == "computing steps 3 to 4\n"


def test_difference_exits_with_1(calls):
    invoke("runs/a", "--step", "4", code=0)
    result = invoke("runs/a", "--step", "4", "--json", code=1)
    printed = json.loads(result.stdout)
    assert printed["identical"] is False
    assert printed["different_scalars"] == [{"step": 4, "name": "loss", "recorded": 1.0, "replayed": "nan"}]


def test_page_is_written(calls, tmp_path):
    invoke("runs/<a>", "--step", "4", "--report", str(tmp_path / "page.html"), code=0)
    page = (tmp_path / "page.html").read_text()
    assert "<title>Step 4 of runs/&lt;a&gt;</title>" in page
    assert "bit-identical" in page


def test_page_that_cannot_be_written_exits_with_1(calls, tmp_path):
    result = invoke("runs/a", "--step", "4", "--report", str(tmp_path / "none/page.html"), code=1)
    assert "cannot write" in result.stderr


@pytest.mark.parametrize("words", [["runs/a"], ["--step", "4"], ["runs/a", "--step", "0"], ["runs/a", "--step", "x"]])
def test_bad_arguments_exit_with_2(words):
    invoke(*words, code=2)
