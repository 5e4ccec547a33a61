"""Errors are reported before anything is trained or written."""

import re

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from support import cli_runs


def test_missing_validation_data_is_reported_before_training(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words to read\n" * 50)
    settings = (f"input.source={{type: files, paths: {text}}}", "evaluators={eval: {type: loss-evaluator}}")
    result = cli_runs.axlearn(*cli_runs.arguments(tmp_path / "run", steps=2, settings=settings), code=2)
    assert "no validation data" in result.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_target_is_refused_by_every_command(tmp_path):
    for command in (["config", "check", "quickstart"], cli_runs.arguments(tmp_path / "run", steps=2)):
        result = CliRunner().invoke(cli, [*command, "--target", "cpuu-8"])
        assert result.exit_code == 2
        assert "did you mean: cpu-8" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_mesh_does_not_divide_is_found_without_training(tmp_path):
    run = tmp_path / "run"
    wrong = ("--target", "cpu-8", "--set", "input.batch_size=6")
    for command in (["config", "check", "quickstart"], ["train", "quickstart", "--run-dir", str(run)]):
        result = CliRunner().invoke(cli, [*command, *wrong])
        assert result.exit_code == 2
        assert re.search(r"input \(\w+\): dimension 0 \(batch\) is not divisible[\s\S]*got: 6 over 8", result.stderr)
    assert not run.exists()


@pytest.mark.slow
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path):
    result = cli_runs.axlearn(
        *cli_runs.arguments(tmp_path / "run", steps=2, settings=("model.vocab_size=1024",)), code=2
    )
    assert "model.vocab_size" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = cli_runs.axlearn(
        *cli_runs.arguments(tmp_path / "file" / "run", steps=2), code=2
    )  # known before anything is done
    assert "file/run" in result.stderr
