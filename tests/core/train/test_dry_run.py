"""`axlearn train --dry-run`: says what would run, and touches nothing."""

import json

import pytest
import tokenizers
from click.testing import CliRunner

from axlearn_core.cli.main import cli

SMALL = ["--set", "model.decoder.num_layers=1", "--set", "model.decoder.hidden_dim=32", "--set", "evaluators={}"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry(*words, code=0):
    result = CliRunner().invoke(cli, ["train", "quickstart", "--dry-run", *SMALL, *words])
    assert result.exit_code == code, result.output
    if code:
        return result.stderr
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines())


def test_it_says_what_would_run_and_writes_nothing(folder):
    facts = dry("--steps", "7", "--run-dir", "run", "--with", "rope:theta=5000", "--set", "checkpointer.every_steps=3")
    assert facts["experiment"] == "quickstart"
    assert facts["features"] == "rope"
    assert facts["steps"] == "from step 0 to 7"
    assert facts["checkpoints"].startswith("every 3 steps and at the end, in ")
    assert int(facts["parameters"].replace(",", "")) > 2048 * 32
    assert "GiB on each device" in facts["state"]
    assert "tokens [8, 256]" in facts["batch"]
    assert facts["run"].endswith("run")
    assert facts["data"].endswith(" bytes")
    assert facts["tokenizer"] == "python-2k: 2,048 tokens, documents end with '<|endoftext|>'"
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_there_is_continued(folder):
    words = ["train", "quickstart", *SMALL, "--set", "input.sequence_length=16", "--set", "input.batch_size=8"]
    assert CliRunner().invoke(cli, [*words, "--run-dir", "run", "--steps", "2"]).exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    more = ("--set", "input.sequence_length=16", "--set", "input.batch_size=8", "--run-dir", "run")
    assert dry(*more, "--steps", "5")["steps"] == "from step 2, its newest checkpoint, to 5"
    assert dry(*more, "--steps", "5", "--restart")["steps"] == "from step 0 to 5"
    assert "model.decoder.num_layers" in dry(*more, "--set", "model.decoder.num_layers=2", code=2)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_what_train_refuses_is_refused(folder):
    assert "no 'num_layer'" in dry("--set", "model.decoder.num_layer=2", code=2)
    (folder / "other").mkdir()
    (folder / "other/file").write_text("mine")
    assert "other" in dry("--run-dir", "other", code=2)
    assert [p.name for p in folder.rglob("*")] == ["other", "file"]


FILES = "input.source={type: files, paths: '*.txt'}"


def word_tokenizer(path, *special):
    """Write a tokenizer of three words and special tokens."""
    vocab = {word: i for i, word in enumerate((*special, "a", "b", "[UNK]"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return f"input.tokenizer={{type: tokenizer-json, path: {path}}}"


@pytest.mark.parametrize("command", [["config", "check"], ["train", "--dry-run"]])
def test_checks_open_the_data_as_training_does(command, folder):
    def check(*settings, code=2, evaluates=False):
        words = [w for setting in settings for w in ("--set", setting)]
        small = SMALL[:-2] if evaluates else SMALL  # the last words are evaluators={}
        result = CliRunner().invoke(cli, [*command, "quickstart", *small, *words])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    assert "no data file matches '*.txt'" in check(FILES)
    (folder / "a.txt").write_text("a b " * 50)
    assert "input.source has no validation data" in check(FILES, evaluates=True)
    plain = check(FILES, code=0)
    assert "1 file, 200 bytes" in plain
    assert "python-2k: 2,048 tokens" in plain
    endless = check(FILES, word_tokenizer(folder / "endless.json"))
    assert "endless.json has no end-of-document token" in endless
    assert "fix: set eos" in endless
    whole = check(FILES, word_tokenizer(folder / "whole.json", "<eos>"), code=0)
    assert f"{folder / 'whole.json'}: 4 tokens, documents end with '<eos>'" in whole
    (folder / "a.txt").write_bytes(b"\0\1")
    assert "a.txt is binary" in check(FILES)


def test_a_check_without_data_does_not_open_it(folder):
    words = ["config", "check", "quickstart", *SMALL, "--set", FILES]
    assert CliRunner().invoke(cli, words).exit_code == 2
    result = CliRunner().invoke(cli, [*words, "--no-data"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert json.loads(CliRunner().invoke(cli, [*words, "--no-data", "--json"]).stdout) == []


def test_trained_parameters_are_counted(folder):
    frozen = dry("--with", "freeze:pattern=decoder.embedding.**")["parameters"]
    total, trained = (int(word.replace(",", "")) for word in frozen.split() if word[0].isdigit())
    assert total - trained == 2048 * 32
    assert frozen == f"{total:,}, of which {trained:,} are trained"
    assert dry()["parameters"] == f"{total:,}"
