import hashlib
import json
import sys

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.cli.main import cli
from axlearn_core.errors import CheckpointError


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text("resolved: true\ncheckpointer: {type: sharded, uri: null}\n")
    one = ShardedCheckpointer.Config().build(directory=tmp_path / "checkpoints")
    for step in (10, 20):
        one.save(step, {"params": {"w": jnp.ones((3, 4))}, "step": jnp.int32(step)}, metrics={"eval_loss": 0.5})
    one.wait()
    one.close()
    return tmp_path


def axlearn(*args, code=0):
    result = CliRunner().invoke(cli, ["checkpoint", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def test_list(run_dir):
    lines = axlearn("list", run_dir).stdout.splitlines()
    assert lines[0].split() == ["STEP", "CREATED", "ARRAYS", "SIZE", "STATE", "METRICS"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20"]
    assert lines[2].endswith("complete  eval_loss 0.5")
    rows = json.loads(axlearn("list", run_dir, "--json").stdout)
    assert [(r["name"], r["step"], r["arrays"], r["state"]) for r in rows] == [
        ("10", 10, 2, "complete"),
        ("20", 20, 2, "complete"),
    ]


def test_inspect(run_dir):
    rows = json.loads(axlearn("inspect", run_dir, "--step", 10, "--json").stdout)
    assert rows == [
        {"name": "params.w", "shape": [3, 4], "dtype": "float32"},
        {"name": "step", "shape": [], "dtype": "int32"},
    ]
    result = axlearn("inspect", run_dir, "--verify")
    assert "step 20: 2 arrays" in result.stderr
    assert "all files match their hashes" in result.stderr
    assert "params.w  3 x 4  float32" in result.stdout


def test_damage_is_shown_and_verified(run_dir):
    (run_dir / "checkpoints" / "10" / "manifest.json").write_text("{")
    assert [r["state"] for r in json.loads(axlearn("list", run_dir, "--json").stdout)] == ["damaged", "complete"]
    (run_dir / "checkpoints" / "20" / "extra.json").write_text("[]")
    assert "extra.json: got sha256" in axlearn("inspect", run_dir, "--verify", code=2).stderr


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_format_that_is_not_read(run_dir, number):
    file = run_dir / "checkpoints/20/manifest.json"
    body = {**json.loads(file.read_text()), "format": number}
    del body["sha256"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, **body}))
    states = [r["state"] for r in json.loads(axlearn("list", run_dir, "--json").stdout)]
    assert states == ["complete", f"format {number}"]
    error = axlearn("inspect", run_dir, code=2).stderr
    assert f"step 20 in {run_dir}/checkpoints has format {number}\n    expected: format 3 or 4\n    fix: " in error
    assert ("commit 5eb2bae of axlearn-core reads formats 1 to 3" in error) == (number < 3)
    checkpointer = ShardedCheckpointer.Config().build(directory=run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match=f"has format {number}"):
        checkpointer.restore(20, {"params": {"w": jnp.ones((3, 4))}, "step": jnp.int32(0)})
    checkpointer.close()


@pytest.mark.parametrize("command", ["list", "inspect"])
def test_a_directory_that_is_no_run(tmp_path, command):
    assert "is not a run directory: it has no config.yaml" in axlearn(command, tmp_path, code=2).stderr


def test_the_manifest_is_read_without_jax_or_orbax(run_dir):
    import subprocess

    code = (
        "import sys; from axlearn_core.cli.main import cli\n"
        f"try: cli(['checkpoint', 'inspect', {str(run_dir)!r}])\n"
        "finally: assert not {'jax', 'orbax', 'tensorstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
