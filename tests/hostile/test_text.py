"""Text that steers terminals, or that no encoding has, in files of others."""

import json

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import InputError, escape_controls
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson

KEYS = {
    "a title": "\\e]0;x\\a",
    "a color": "\\e[31mred",
    "a way back": "\\b\\b\\b",
    "a carriage return": "x\\rerror: nothing",
    "C1": "\\x9b31m",
    "other direction": "\\u202eabc",
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("document", ['"{}": 1', 'experiment: "{}"', 'experiment: quickstart\nset: {{"{}": 1}}'])
def test_errors_do_not_steer_a_terminal(name, document, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(document.format(KEYS[name]))
    result = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert not [c for c in result.stderr if c != "\n" and not c.isprintable()]


def test_what_is_no_control_stays():
    assert escape_controls("Größe\t→ 漢字\n") == "Größe\t→ 漢字\n"
    assert escape_controls("\x1b[0m \udc80") == "\\x1b[0m \\udc80"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer.Config(), TokenizerJson.Config(builtin="python-2k")], ids=repr)
def test_a_lone_surrogate_is_one_error(tokenizer):
    with pytest.raises(InputError, match=r"lone surrogate '\\ud800' at character 2"):
        tokenizer.build().encode("ab\ud800c")


def test_a_pattern_that_backtracks_for_ever_is_one_error(tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = TokenizerJson.Config(path=str(tmp_path / "tokenizer.json")).build()
    with pytest.raises(InputError, match="the tokenizer fails on a text of 41 characters"):
        tokenizer.encode("a" * 40 + "!")
    with pytest.raises(InputError, match="the tokenizer fails"):
        tokenizer.encode_special("a" * 40 + "!")
    assert tokenizer.encode("a") == [0]


def test_an_id_beyond_every_vocabulary_is_one_error(tmp_path):
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 4_000_000_000, "</s>": 1}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"has the id 4,000,000,000\n    expected: less than 16,777,216"):
        TokenizerJson.Config(path=str(tmp_path / "tokenizer.json")).build()


def test_a_backend_that_is_not_here_is_one_error(monkeypatch):
    import axlearn_core.compose.devices as devices

    def fail():
        raise RuntimeError("Unable to initialize backend 'foo': it is not in the list of known backends")

    monkeypatch.setattr(devices.jax, "devices", fail)
    result = CliRunner().invoke(cli, ["train", "quickstart", "--dry-run"])
    assert result.exit_code == 2, result.output
    assert "JAX has no devices" in result.stderr
