"""Model directories in Hugging Face format that somebody hostile, or a bad download, made."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_models.huggingface.import_export import _kept_files, import_run
from axlearn_plugins_models.huggingface.source import open_model
from support.paths import HF_FIXTURES

FIRST, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def edit(folder, **values):
    file = folder / "config.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in {**data, **values}.items() if v != "GONE"}))


def rewrite(folder, old, new):
    file = folder / "config.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def reindex(folder, name):
    file = folder / INDEX
    data = json.loads(file.read_text())
    data["weight_map"] = dict.fromkeys(data["weight_map"], name)
    file.write_text(json.dumps(data))


def replace(folder, name, make):
    (folder / name).unlink()
    make(folder / name)


def sparse(file):
    with file.open("wb") as handle:
        handle.write((1 << 40).to_bytes(8, "little"))
        handle.truncate((1 << 40) + 8)


def link(target):
    return lambda file: file.symlink_to(target)


def deep(file):
    file.write_text('{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}")


def poison(folder, value):
    values = load_file(folder / FIRST)
    name = sorted(values)[0]
    values[name] = values[name].copy()
    values[name].reshape(-1)[3] = value
    save_file(values, folder / FIRST, metadata={"format": "pt"})


ATTACKS = {
    "link-config": (
        lambda d: replace(d, "config.json", link("/etc/hosts")),
        "is a link to a file outside its directory",
    ),
    "link-weights": (lambda d: replace(d, FIRST, link("/etc/hosts")), "is a link to a file outside its directory"),
    "link-tokenizer": (
        lambda d: replace(d, "tokenizer.json", link("/etc/hosts")),
        "is a link to a file outside its directory",
    ),
    "link-circle": (lambda d: replace(d, FIRST, link(FIRST)), "missing|broken link|Too many"),
    "index-outside": (lambda d: reindex(d, "../../x.safetensors"), "outside its directory"),
    "index-absolute": (lambda d: reindex(d, "/etc/hosts"), "outside its directory"),
    "index-number": (lambda d: reindex(d, 7), "is not a safetensors index"),
    "index-fifo": (lambda d: replace(d, INDEX, os.mkfifo), "neither model.safetensors nor"),
    "weights-fifo": (lambda d: replace(d, FIRST, os.mkfifo), "is not a regular file"),
    "tokenizer-fifo": (lambda d: replace(d, "tokenizer.json", os.mkfifo), "has no tokenizer.json"),
    "config-fifo": (lambda d: replace(d, "config.json", os.mkfifo), "has no config.json"),
    "sparse-header": (lambda d: replace(d, FIRST, sparse), "the header length is"),
    "deep-config": (lambda d: replace(d, "config.json", deep), "nested too deeply|has no"),
    "layers": (lambda d: edit(d, num_hidden_layers=10**9), "num_hidden_layers: is too large[\\s\\S]*tensors"),
    "layers-huge": (lambda d: edit(d, num_hidden_layers=10**300), "num_hidden_layers: is too large"),
    "layers-negative": (lambda d: edit(d, num_hidden_layers=-7), "num_hidden_layers: is too large"),
    "width": (lambda d: edit(d, hidden_size=10**12), "hidden_size: is too large"),
    "vocabulary": (lambda d: edit(d, vocab_size=10**15), "vocab_size: is too large"),
    "heads-zero": (lambda d: edit(d, num_attention_heads=0, head_dim="GONE"), "config.json|num_heads"),
    "heads-text": (lambda d: edit(d, num_attention_heads="many"), "num_heads|config.json"),
    "width-list": (lambda d: edit(d, hidden_size=[32]), "hidden_dim|config.json"),
    "width-null": (lambda d: edit(d, hidden_size=None), "hidden_dim|config.json"),
    "vocabulary-text": (lambda d: edit(d, vocab_size="96"), "vocab_size: wrong type"),
    "architectures-number": (lambda d: edit(d, architectures=7), "config.json"),
    "rope-list": (lambda d: edit(d, rope_parameters=[1]), "config.json"),
    "rope-text": (lambda d: edit(d, rope_parameters="linear"), "config.json"),
    "type-list": (lambda d: edit(d, model_type=["llama"]), "model_type"),
    "type-number": (lambda d: edit(d, model_type=5), "model_type"),
    "eps-text": (lambda d: edit(d, rms_norm_eps="tiny"), "config.json"),
    "eps-nan": (lambda d: edit(d, rms_norm_eps=float("nan")), "NaN is not a JSON number"),
    "eps-infinite": (
        lambda d: rewrite(d, '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999'),
        "1e999 is not a JSON number",
    ),
    "length-text": (lambda d: edit(d, max_position_embeddings="long"), ""),
    "quantization-list": (lambda d: edit(d, quantization_config=[1]), "config.json"),
    "not-an-object": (lambda d: (d / "config.json").write_text("[1]"), "is not a JSON object"),
    "null": (lambda d: (d / "config.json").write_text("null"), "is not a JSON object"),
}


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(HF_FIXTURES / "llama3", tmp_path / "model", ignore=shutil.ignore_patterns("expected*"))


@pytest.mark.slow_cases("type-list", "type-number")
@pytest.mark.parametrize("name", ATTACKS)
def test_one_error_and_nothing_is_written(name, model, tmp_path):
    attack, message = ATTACKS[name]
    attack(model)
    if name == "length-text":  # only a bound of the input
        open_model(model)
        return
    with pytest.raises(RequestError, match=message):
        open_model(model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(value, model):
    poison(model, value)
    with pytest.raises(AxlearnError, match=r"model-00001[\s\S]*has 1 non-finite values, the first at \[0, 3\]"):
        open_weights(model).read("**")


def test_a_link_is_never_copied_into_a_run(model, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    (model / "LICENSE-x").symlink_to(secret)
    with pytest.raises(RequestError, match="LICENSE-x is a link to a file outside its directory"):
        import_run(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_link_in_a_run_is_never_exported(tmp_path):
    (tmp_path / "run/huggingface").mkdir(parents=True)
    (tmp_path / "run/huggingface/LICENSE-x").symlink_to("/etc/hosts")
    with pytest.raises(RequestError, match="is a link to a file outside its directory"):
        _kept_files(tmp_path / "run")


def test_a_cache_of_the_hub_is_read(model, tmp_path):
    blobs, snapshot = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(model.iterdir())):
        shutil.copyfile(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert open_model(snapshot).stored
