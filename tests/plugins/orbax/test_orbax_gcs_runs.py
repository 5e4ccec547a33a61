"""Runs with checkpoints, or their whole directory, in Google Cloud Storage, with an emulator."""

import json

import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from axlearn_core.run import open_weights
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from support import api_runs, cli_runs
from support.needs import needs

pytestmark = needs("gcsfs")


def listed(place):
    result = CliRunner().invoke(cli, ["checkpoint", "list", str(place), "--json"])
    assert result.exit_code == 0, result.output
    return [(row["step"], row["state"]) for row in json.loads(result.stdout)]


def train(run, steps, **fields):
    return api_runs.train(run, steps=steps, checkpointer=OrbaxCheckpointer.Config(every_steps=2, keep_last=2, **fields))


@pytest.mark.slow
def test_a_run_is_saved_listed_resumed_pruned_and_read(gs, tmp_path):
    uri = f"{gs}/runs/toy (1)"
    train(tmp_path / "whole", 8)
    train(tmp_path / "run", 5, uri=uri)
    assert listed(uri) == listed(tmp_path / "run") == [(4, "complete"), (5, "complete")]
    train(tmp_path / "run", 8, uri=uri)
    assert cli_runs.losses(tmp_path / "run") == cli_runs.losses(tmp_path / "whole")
    assert listed(uri) == listed(tmp_path / "run") == [(6, "complete"), (8, "complete")]
    assert {f.path.partition("/")[0] for f in open_storage(uri).list()} == {"6", "8"}
    local = open_weights(tmp_path / "whole").read()
    for place in (uri, tmp_path / "run"):
        for path, value in open_weights(place).read().items():
            assert (value == local[path]).all()
    verified = CliRunner().invoke(cli, ["checkpoint", "inspect", uri, "--verify"])
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_a_run_directory_in_a_bucket_goes_on_elsewhere(gs, tmp_path, monkeypatch):
    uri = f"{gs}/runs/toy"
    train(tmp_path / "whole", 6)
    for machine, steps in (("a", 3), ("b", 6)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        train(uri, steps)
    assert listed(uri) == [(4, "complete"), (6, "complete")]
    records = [json.loads(line) for line in open_storage(uri).read("metrics.jsonl").decode().splitlines()]
    assert [(r["step"], r["loss"]) for r in records if "loss" in r] == cli_runs.losses(tmp_path / "whole")
    local = open_weights(tmp_path / "whole").read()
    assert ax.load(uri).step == 6
    for path, value in open_weights(uri).read().items():
        assert (value == local[path]).all()


@pytest.mark.slow
def test_kills_in_saves_leave_whole_checkpoints_and_no_trace(gs, tmp_path):
    steps, run, whole, uri = 24, tmp_path / "run", tmp_path / "whole", f"{gs}/run"
    on_disk = ("checkpointer={type: orbax, every_steps: 2}",)
    in_bucket = (f"checkpointer={{type: orbax, every_steps: 2, uri: {uri}}}",)
    cli_runs.axlearn(*cli_runs.arguments(whole, steps=steps, settings=on_disk), fresh=True)
    storage, cut = open_storage(uri), 0

    def unfinished():
        files = [f.path for f in storage.list()]
        return {
            p.partition("/")[0] for p in files if p[0].isdigit() and f"{p.partition('/')[0]}/manifest.json" not in files
        }

    for _ in range(3):
        process = cli_runs.start(*cli_runs.arguments(run, steps=steps, settings=in_bucket))
        goal, before = len(cli_runs.logged(run)) + 2, unfinished()
        assert cli_runs.kill_when(process, lambda g=goal, b=before: len(cli_runs.logged(run)) >= g and unfinished() - b)
        process.communicate()
        cut += bool(unfinished() - before)
        if any(f.path.endswith("/manifest.json") for f in storage.list()):
            assert {state for _, state in listed(uri)} == {"complete"}
    assert cut > 0, "no save was cut off: the test shows nothing"
    cli_runs.axlearn(*cli_runs.arguments(run, steps=steps, settings=in_bucket), fresh=True)
    assert cli_runs.losses(run) == cli_runs.losses(whole)
    assert not unfinished()
    expected = open_weights(whole).read()
    for path, value in open_weights(uri).read().items():
        assert (value == expected[path]).all()
