"""Which token ends a text: every file of a model directory that may say so is asked."""

import json
import shutil
from pathlib import Path

import pytest

from axlearn_plugins_models.huggingface.source import open_model

QWEN = Path(__file__).parent / "fixtures/qwen3"


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(QWEN, folder)
    data = json.loads((folder / "config.json").read_text())
    del data["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def write(folder, name, **data):
    (folder / name).write_text(json.dumps(data))


def end(folder):
    source = open_model(folder)
    return source.config.input.tokenizer.eos, " ".join(source.notes)


def test_of_generation_config(directory):
    write(directory, "generation_config.json", eos_token_id=[7, 5])
    token, notes = end(directory)
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab[token] == 7
    assert "ends a text" not in notes


def test_tokenizer_config_says_which_of_several_ends_an_answer(directory):
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    five = next(t for t, i in vocab.items() if i == 5)
    write(directory, "generation_config.json", eos_token_id=[7, 5])
    write(directory, "tokenizer_config.json", eos_token={"content": five})
    assert end(directory)[0] == five


def test_tokenizer_config_alone(directory):
    write(directory, "tokenizer_config.json", eos_token="<s>")
    assert end(directory)[0] == "<s>"


@pytest.mark.parametrize("value", [None, [], "2", True, -1, 10**12, {"a": 1}])
def test_no_file_names_one(directory, value):
    write(directory, "generation_config.json", eos_token_id=value)
    write(directory, "tokenizer_config.json", eos_token="not in the vocabulary")
    token, notes = end(directory)
    assert token is None
    assert "no file names the token that ends a text" in notes
