"""Runs at URIs are replayed from the bucket alone, and nothing in the bucket changes."""

import json
import shutil

import pytest
from click.testing import CliRunner

from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from support import api_runs


def contents(uri):
    storage = open_storage(uri)
    return {file.path: storage.read(file.path) for file in storage.list()}


def replay(uri, *options):
    result = CliRunner().invoke(cli, ["replay", uri, "--step", "4", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "gs", "memory"])
def test_a_run_in_a_bucket_is_replayed(store, tmp_path, request, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket = {"s3": lambda: request.getfixturevalue("s3")[0], "gs": lambda: request.getfixturevalue("gs")}.get(
        store, lambda: "memory://bucket"
    )()
    uri = f"{bucket}/runs/toy"
    api_runs.train(uri, steps=4, **{"checkpointer.every_steps": 2})
    shutil.rmtree("runs")  # another machine does not have the working copy
    before = contents(uri)
    result = replay(uri)
    assert result["identical"] is True
    assert result["start"] == 2
    assert result["compared"]["arrays"] > 20
    assert result["compared"]["scalars"] >= 8
    assert contents(uri) == before
    assert not list(tmp_path.glob("runs/**/*"))


@pytest.mark.slow
def test_a_local_run_with_checkpoints_in_a_bucket_is_replayed(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"{s3[0]}/checkpoints"
    api_runs.train(tmp_path / "run", steps=4, **{"checkpointer.every_steps": 2, "checkpointer.uri": uri})
    before = contents(uri)
    result = replay(str(tmp_path / "run"), "--probe", "decoder.layer.0.attention", "--bisect")
    assert result["identical"] is True
    assert contents(uri) == before
