"""Commands on the URI of a run give the same results as on the run, at a local path. Trains toy models."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.errors import CheckpointError
from support.shelf_storage import Shelf

pytestmark = pytest.mark.slow

SETTINGS = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
    "trackers": [{"type": "jsonl"}],
}
SHELF = """
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_checkpoint_storage(uri):
    from support.shelf_storage import Shelf
    return Shelf(uri.removeprefix("shelf://")) if uri.startswith("shelf://") else None
"""


@pytest.fixture(autouse=True)
def shelf(tmp_path, monkeypatch):
    """The scheme `shelf`, with local paths."""
    info = tmp_path / "site/shelf-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
    )
    (info / "entry_points.txt").write_text("[axlearn.plugins]\nshelf = shelf_of_tests\n")
    (tmp_path / "site/shelf_of_tests.py").write_text(SHELF)
    monkeypatch.syspath_prepend(str(info.parent))
    Shelf.files = set()
    yield
    sys.modules.pop("shelf_of_tests", None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train a run and a run with adapters on it."""
    place = tmp_path_factory.mktemp("runs")
    for name, features in (("base", []), ("tuned", [f"lora:rank=2,base={place}/base"])):
        ax.train("quickstart", with_=features, set=SETTINGS, steps=1, run_dir=place / name)
    return place


def invoke(*words, code=0):
    result = CliRunner().invoke(cli, [str(w) for w in words])
    assert result.exit_code == code, result.output
    return result.output


COMMANDS = {
    "convert": ("base", ["convert"], ["--with", "interleave:window=4"]),
    "upcycle": ("base", ["upcycle"], ["--with", "moe:num_experts=2,top_k=1"]),
    "quantize": ("base", ["quantize"], []),
    "merge": ("tuned", ["lora", "merge"], []),
    "export-adapters": ("tuned", ["lora", "export"], []),
    "export-peft": ("tuned", ["lora", "export"], ["--format", "peft", "--base", "base"]),
    "export-hf": ("base", ["checkpoint", "export-hf"], []),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_uri_gives_what_the_run_gives(command, runs, tmp_path):
    name, words, options = COMMANDS[command]
    uri = f"shelf://{runs / name}"
    invoke(*words, runs / name, tmp_path / "local", *options)
    assert not Shelf.files
    invoke(*words, uri, tmp_path / "far", *options)
    assert any(file.endswith(".bin") or "/state/" in file for file in Shelf.files), Shelf.files
    names = [sorted(p.name for p in (tmp_path / d).iterdir()) for d in ("local", "far")]
    assert names[0] == names[1]
    if words[-1] == "export" or command == "export-hf":
        for file in (p for p in (tmp_path / "local").rglob("*.safetensors")):
            assert file.read_bytes() == (tmp_path / "far" / file.name).read_bytes()
        return
    local, far = (ax.open_weights(tmp_path / d).read() for d in ("local", "far"))
    assert local.keys() == far.keys()
    for path, x in local.items():
        np.testing.assert_array_equal(x, far[path], err_msg=path)
    assert json.loads((tmp_path / "far/run.lock.json").read_text())["made_from"] == uri


@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_in_a_storage_is_refused(command, runs, tmp_path):
    name, words, options = COMMANDS[command]
    output = invoke(*words, runs / name, f"shelf://{tmp_path}/made", *options, code=2)
    assert "the scheme 'shelf'" in output
    assert "expected: a path" in output
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_scheme_and_an_empty_storage_are_refused(command, tmp_path):
    _, words, options = COMMANDS[command]
    output = invoke(*words, "nowhere://run", tmp_path / "made", *options, code=2)
    assert "the scheme 'nowhere' is unknown" in output
    output = invoke(*words, f"shelf://{tmp_path}/none", tmp_path / "made", *options, code=2)
    assert "is not a run directory" in output
    assert not (tmp_path / "made").exists()


def test_a_training_begins_with_a_run_at_a_uri(runs, tmp_path):
    ax.train(
        "quickstart", with_=[f"lora:rank=2,base=shelf://{runs}/base"], set=SETTINGS, steps=1, run_dir=tmp_path / "run"
    )
    base, tuned = (ax.open_weights(run).read() for run in (runs / "base", tmp_path / "run"))
    for path, x in base.items():
        np.testing.assert_array_equal(x, tuned[path], err_msg=path)


def test_a_damaged_config_at_a_uri_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.yaml").write_text("resolved: true\nmodel: 3\n")
    with pytest.raises(CheckpointError, match="shelf://"):
        ax.open_weights(f"shelf://{tmp_path}")
