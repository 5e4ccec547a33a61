"""Text that steers terminals, or that no encoding has, in files of others."""

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


def test_a_backend_that_is_not_here_is_one_error(monkeypatch):
    import axlearn_core.compose.devices as devices

    def fail():
        raise RuntimeError("Unable to initialize backend 'foo': it is not in the list of known backends")

    monkeypatch.setattr(devices.jax, "devices", fail)
    result = CliRunner().invoke(cli, ["train", "quickstart", "--dry-run"])
    assert result.exit_code == 2, result.output
    assert "JAX has no devices" in result.stderr
