"""`axlearn checkpoint list` and `inspect` show what plain Orbax wrote, under any name of its items."""

import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from click.testing import CliRunner

from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from support.needs import require

# Plain Orbax takes shardings from the files if it is not told any, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
TREE = {"params": {"w": jnp.ones((4, 2)), "b": jnp.arange(3)}, "step": jnp.asarray(3)}
ARRAYS = {"params.w": [4, 2], "params.b": [3], "step": []}


def write_maxtext(folder):
    handlers = {"items": ocp_v0.PyTreeCheckpointHandler()}
    with ocp_v0.CheckpointManager(folder, item_names=("items",), item_handlers=handlers) as manager:
        manager.save(3, args=ocp_v0.args.Composite(items=ocp_v0.args.PyTreeSave(TREE)))


def write_maxtext_with_data(folder):
    with ocp_v0.CheckpointManager(folder, item_names=("items", "iter")) as manager:
        parts = {"items": ocp_v0.args.PyTreeSave(TREE), "iter": ocp_v0.args.JsonSave({"position": 1})}
        manager.save(3, args=ocp_v0.args.Composite(**parts))


def write_tunix(folder):
    with ocp.training.Checkpointer(folder) as manager:
        manager.save_checkpointables(3, {"model_params": TREE["params"], "optimizer_state": {"mu": jnp.ones(2)}})


def write_v0_default(folder):
    with ocp_v0.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp_v0.args.StandardSave(TREE))


def write_v0_alone(folder):
    ocp_v0.PyTreeCheckpointer(use_ocdbt=False).save(folder / "3", TREE)


def write_v1_default(folder):
    with ocp.training.Checkpointer(folder) as manager:
        manager.save(3, TREE)


def write_v1_alone(folder):
    ocp.save(folder / "3", TREE)


WRITERS = [
    write_maxtext,
    write_maxtext_with_data,
    write_tunix,
    write_v0_default,
    write_v0_alone,
    write_v1_default,
    write_v1_alone,
]
TUNIX = {"model_params.w": [4, 2], "model_params.b": [3], "optimizer_state.mu": [2]}


def checkpoint(*words, code=0):
    result = CliRunner().invoke(cli, ["checkpoint", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.slow_cases("write_tunix", "write_v1_alone")
@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
def test_a_folder_of_plain_orbax(write, tmp_path):
    write(tmp_path)
    expected = TUNIX if write is write_tunix else ARRAYS
    listed = checkpoint("list", tmp_path, "--json")
    assert [(r["step"], r["arrays"], r["state"]) for r in json.loads(listed.stdout)] == [
        (3, len(expected), "unverified")
    ]
    assert "Orbax wrote step 3 without a manifest, so the files cannot be verified" in listed.stderr
    inspected = checkpoint("inspect", tmp_path, "--json")
    assert {r["name"]: r["shape"] for r in json.loads(inspected.stdout)} == expected
    assert "without a manifest" in checkpoint("inspect", tmp_path, "--step", 3).stderr
    assert "cannot be verified\n    fix: remove --verify" in checkpoint("inspect", tmp_path, "--verify", code=2).stderr


def test_steps_next_to_those_of_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("resolved: true\ncheckpointer: {type: orbax, uri: null}\n")
    one = OrbaxCheckpointer.Config().build(directory=tmp_path / "checkpoints")
    for step in (1, 2):
        one.save(step, TREE)
    one.close()
    write_maxtext(tmp_path / "checkpoints")
    ocp.save(tmp_path / "checkpoints/4", TREE)
    shutil.rmtree(tmp_path / "checkpoints/4/state")
    (tmp_path / "checkpoints/2/manifest.json").unlink()
    listed = checkpoint("list", tmp_path, "--json")
    states = [(r["step"], r["state"]) for r in json.loads(listed.stdout)]
    assert states == [(1, "complete"), (2, "damaged"), (3, "unverified"), (4, "damaged")]
    assert "Orbax wrote step 3, 4 without" in listed.stderr
    assert "all files match their hashes" in checkpoint("inspect", tmp_path, "--step", 1, "--verify").stderr


@pytest.mark.parametrize("command", ["list", "inspect"])
def test_no_accelerator_is_looked_for(tmp_path, monkeypatch, command):
    write_v1_alone(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS")
    checkpoint(command, tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_the_folder_of_one_step(tmp_path):
    write_v1_alone(tmp_path)
    assert "use its parent folder" in checkpoint("list", tmp_path / "3", code=2).stderr
    assert "its parent folder" not in checkpoint("list", tmp_path / "none", code=2).stderr


def test_other_folders_are_not_of_orbax(tmp_path):
    ocp.save(tmp_path / "final", TREE)  # not a step
    (tmp_path / "3").mkdir()
    (tmp_path / "3/notes.txt").write_text("mine")
    assert "is not a run directory" in checkpoint("list", tmp_path, code=2).stderr


def test_a_save_of_orbax_under_way_in_a_bucket_is_not_listed(gs, tmp_path):
    require("gcsfs")
    write_maxtext(tmp_path)
    storage = open_storage(f"{gs}/plain")
    for file in (p for p in (tmp_path / "3").rglob("*") if p.is_file()):
        if file.parent.name != "3" or file.name != "commit_success.txt":
            storage.write(file.relative_to(tmp_path).as_posix(), [file.read_bytes()])
    assert "is not a run directory" in checkpoint("list", f"{gs}/plain", code=2).stderr
    storage.write("3/commit_success.txt", [b"done"])
    rows = json.loads(checkpoint("list", f"{gs}/plain", "--json").stdout)
    assert [(r["step"], r["arrays"], r["state"]) for r in rows] == [(3, 3, "unverified")]


def test_a_run_without_such_steps_is_listed_without_jax_or_orbax(tmp_path):
    one = OrbaxCheckpointer.Config().build(directory=tmp_path)
    one.save(1, TREE)
    one.close()
    code = (
        "import sys; from axlearn_core.cli.main import cli\n"
        f"try: cli(['checkpoint', 'list', {str(tmp_path)!r}])\n"
        "finally: assert not {'jax', 'orbax', 'tensorstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
