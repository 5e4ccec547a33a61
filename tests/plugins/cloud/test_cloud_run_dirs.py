"""Run directories in a bucket, with nothing left on the local machine."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import axlearn_core as ax
import axlearn_plugins_transformer.text as text
from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from axlearn_core.config import Configurable, node, patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run.asset_copies import cache_folder
from axlearn_core.run.working_copy import working_copy
from axlearn_plugins_runtime.job.holder import Holder
from axlearn_plugins_runtime.job.mirror import RunMirror
from support import api_runs


@pytest.fixture(autouse=True)
def local_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(run, *, steps, **settings):
    return api_runs.train(run, steps=steps, **{"checkpointer.every_steps": 2, **settings})


def losses(storage):
    return [json.loads(line)["loss"] for line in storage.read("metrics.jsonl").decode().splitlines()]


@pytest.mark.parametrize("uri", ["s3://", "s3:///", "gs://"])
def test_a_run_directory_without_a_bucket_is_refused(uri):
    with pytest.raises(RequestError, match="names no bucket"):
        ax.train("quickstart", run_dir=uri)
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_on_another_machine(s3, tmp_path, capsys):
    uri = f"{s3[0]}/runs/toy"
    storage = open_storage(uri)
    result = train(uri, steps=4)
    assert (result.name, result.run_dir) == (uri, working_copy(uri))
    names = {f.path for f in storage.list() if not f.path.startswith("checkpoints/")}
    assert {"config.yaml", "run.lock.json", "metrics.jsonl", "phases.jsonl"} <= names
    assert not [n for n in names if "trainer" in n]
    shutil.rmtree("runs")  # another machine does not have the working copy
    capsys.readouterr()
    train(uri, steps=8)
    err = capsys.readouterr().err
    assert "resuming from the checkpoint of step 4" in err
    assert "is the working copy of s3:" in err
    whole = tmp_path / "whole"
    train(whole, steps=8)
    assert losses(storage) == losses(open_storage(whole))
    listed = CliRunner().invoke(cli, ["checkpoint", "list", uri, "--json"])
    assert [row["step"] for row in json.loads(listed.stdout)] == [6, 8], listed.output
    assert ax.load(uri).step == 8
    report = CliRunner().invoke(cli, ["report", uri])
    assert report.exit_code == 0, report.output
    assert "quickstart" in Path(report.stdout.strip()).read_text()


@pytest.mark.slow
def test_a_run_moved_to_a_bucket_has_its_tokenizer(s3, tmp_path, monkeypatch):
    """A run is uploaded file by file, used from the bucket, and resumed there without the local copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_folder.cache_clear()
    tokenizer = tmp_path / "tokenizer.json"
    shutil.copyfile(Path(text.__file__).parent / "python-2k.json", tokenizer)
    choice = {"input.tokenizer": {"type": "tokenizer-json", "path": str(tokenizer)}}
    train(tmp_path / "run", steps=1, **choice)
    uri = f"{s3[0]}/moved"
    storage = open_storage(uri)
    for file in (p for p in (tmp_path / "run").rglob("*") if p.is_file() and not p.name.startswith(".")):
        storage.write(file.relative_to(tmp_path / "run").as_posix(), [file.read_bytes()])
    shutil.rmtree(tmp_path / "run")
    tokenizer.unlink()
    for place in (uri, f"{uri}/checkpoints"):
        assert ax.open_weights(place).tokenizer.encode("def f")
    train(uri, steps=2, **choice)
    train(uri, steps=3, **choice)
    assert len(losses(storage)) == 3
    assert "path: run:files/input.tokenizer/tokenizer.json" in storage.read("config.yaml").decode()
    assert str(tmp_path) not in storage.read("checkpoints/3/config.yaml").decode()
    storage.delete("files/input.tokenizer/tokenizer.json")
    with pytest.raises(CheckpointError, match=r"moved/config\.yaml refers to files that its run does not have"):
        ax.open_weights(uri)
    cache_folder.cache_clear()


@pytest.mark.slow
def test_what_is_here_gives_way_to_what_is_there(s3):
    uri = f"{s3[0]}/runs/toy"
    train(uri, steps=2)
    copy = working_copy(uri)
    (copy / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    (copy / "stale.txt").write_text("")
    train(uri, steps=4)
    assert len(losses(open_storage(uri))) == 4
    assert not (copy / "stale.txt").exists()


@pytest.mark.slow
def test_one_trainer_and_one_config(s3):
    uri = f"{s3[0]}/runs/toy"
    train(uri, steps=2)
    with pytest.raises(CheckpointError, match=r"contains a run with a different config[^$]*seed"):
        train(uri, steps=4, seed=5)
    holders = Holder(open_storage(uri), uri, "id")
    with pytest.raises(CheckpointError, match=rf"{uri} is in use by another trainer"):
        train(uri, steps=4)
    holders.release()
    train(uri, steps=4)


@pytest.mark.slow
def test_a_storage_outage_is_reported_and_recovered(s3, capsys, monkeypatch, tmp_path):
    uri = f"{s3[0]}/run"
    mirror = RunMirror(uri)
    mirror.path.mkdir(parents=True)
    (mirror.path / "metrics.jsonl").write_text("1\n")
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        from axlearn_plugins_cloud import object_storage as retries

        patched.setattr(retries, "ATTEMPTS", 1)
        broken = RunMirror(uri)
        broken.push()
        assert f"cannot update {uri}" in capsys.readouterr().err
        with pytest.raises(RequestError, match=r"--run-dir: .* cannot be read"):
            train(uri, steps=2)
    mirror.push()
    assert open_storage(uri).read("metrics.jsonl") == b"1\n"


class Folder(Configurable):
    """A checkpointer that needs a directory."""

    @node
    class Config(Configurable.Config["Folder"]):
        """Nothing to set."""

    def __init__(self, cfg, *, directory):
        raise AssertionError

    def _never(self, *args, **kwargs):
        raise AssertionError

    due = save = latest_step = steps = restore = wait = close = _never


def test_a_checkpointer_of_directories_is_refused(s3):
    config = patch(ax.resolve("quickstart").config, {"checkpointer": Folder.Config()})
    with pytest.raises(RequestError, match="this checkpointer writes checkpoints to a local directory"):
        ax.train(config, run_dir=f"{s3[0]}/run")
