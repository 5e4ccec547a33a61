"""Parameters go to plain Orbax and come from it as MaxText and Tunix keep them."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from click.testing import CliRunner
from flax import nnx

from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.errors import RequestError
from axlearn_core.run import Run, open_weights
from axlearn_plugins_orbax.layouts import nest
from support import api_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    api_runs.train(path, steps=2)
    return path


@pytest.fixture(scope="module")
def weights(run):
    return {p: np.asarray(x) for p, x in open_weights(run).read().items()}


# Plain Orbax takes shardings from the files if it is not told any, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def invoke(*words):
    return CliRunner().invoke(cli, ["checkpoint", *map(str, words)])


def succeed(*words):
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    return result.stderr


def nested(weights, leaf=None):
    return nest(weights, leaf)


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


FORMATS = [("--ocdbt", "--zarr3"), ("--ocdbt", "--no-zarr3"), ("--no-ocdbt", "--zarr3"), ("--no-ocdbt", "--no-zarr3")]


@pytest.mark.slow
@pytest.mark.parametrize("options", FORMATS, ids=" ".join)
def test_maxtext_finds_its_tree(run, weights, options, tmp_path):
    succeed("export-orbax", run, tmp_path / "out", *options)
    expected = nested(weights)
    # As MaxText opens a run: a manager with an item `items`.
    handlers = {"items": ocp_v0.PyTreeCheckpointHandler()}
    with ocp_v0.CheckpointManager(tmp_path / "out", item_names=("items",), item_handlers=handlers) as manager:
        assert manager.all_steps() == [2]
        restored = manager.restore(2, args=ocp_v0.args.Composite(items=ocp_v0.args.PyTreeRestore()))["items"]
    same(restored["params"]["params"], expected)
    assert restored["step"] == 2
    # As MaxText opens parameters: the directory of the item, of which it restores a part.
    with ocp_v0.Checkpointer(ocp_v0.PyTreeCheckpointHandler()) as checkpointer:
        target = {"params": {"params": expected}}
        arguments = ocp_v0.checkpoint_utils.construct_restore_args(target)
        got = checkpointer.restore(tmp_path / "out/2/items", item=target, transforms={}, restore_args=arguments)
    same(got["params"]["params"], expected)
    assert ("manifest.ocdbt" in {p.name for p in (tmp_path / "out/2/items").iterdir()}) == (options[0] == "--ocdbt")


def test_tunix_finds_its_state(run, weights, tmp_path):

    succeed("export-orbax", run, tmp_path / "out", "--layout", "tunix")
    model = Functional.from_config(Run(run).config.model).describe()
    with ocp.training.Checkpointer(tmp_path / "out") as manager:
        state = nnx.state(model)
        restored = manager.load_checkpointables(2, {"model_params": state})["model_params"]
    assert len(jax.tree.leaves(restored)) == len(weights)
    flat = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(restored)}
    for path, value in weights.items():
        np.testing.assert_array_equal(flat[path].get_value(), value)


@pytest.mark.fast_cases("plain-mine")
@pytest.mark.parametrize(
    ("layout", "item"), [("maxtext", None), ("tunix", None), ("plain", None), ("plain", "mine")], ids=str
)
def test_what_was_exported_is_imported(run, weights, layout, item, tmp_path):
    options = ("--item", item) if item else ()
    succeed("export-orbax", run, tmp_path / "out", "--layout", layout, *options)
    result = succeed("import-orbax", tmp_path / "out", tmp_path / "run", "--config", run, *options)
    assert f"{layout}: " in result.stderr
    assert "cannot be verified" in result.stderr
    same({p: np.asarray(x) for p, x in open_weights(tmp_path / "run").read().items()}, weights)
    assert json.loads((tmp_path / "run/run.lock.json").read_text())["imported_from"] == str(tmp_path / "out/2")
    api_runs.train(tmp_path / "run", steps=1)  # trains from the weights


def write_v0_tree(path, weights):
    ocp_v0.PyTreeCheckpointer().save(path, {"params": {"params": nested(weights)}})
    return path


def write_v0_manager(path, weights):
    state = {
        "step": jnp.asarray(3),
        "params": {"params": nested(weights)},
        "opt_state": [{"mu": jnp.ones(3)}, jnp.asarray(1)],
    }
    handlers = {"items": ocp_v0.PyTreeCheckpointHandler()}
    with ocp_v0.CheckpointManager(path, item_names=("items",), item_handlers=handlers) as manager:
        manager.save(3, args=ocp_v0.args.Composite(items=ocp_v0.args.PyTreeSave(state)))
    return path


def write_v0_item(path, weights):
    return write_v0_manager(path, weights) / "3/items"


def write_v1_state(path, weights):
    with ocp.training.Checkpointer(path) as manager:
        manager.save_checkpointables(
            4, {"model_params": nested(weights, "value"), "optimizer_state": {"mu": jnp.ones(2)}}
        )
    return path


def write_v1_tree(path, weights):
    ocp.save(path, nested(weights))
    return path


@pytest.mark.fast_cases("write_v0_tree")
@pytest.mark.parametrize(
    "write", [write_v0_tree, write_v0_manager, write_v0_item, write_v1_state, write_v1_tree], ids=lambda w: w.__name__
)
def test_what_plain_orbax_wrote_is_imported(run, weights, write, tmp_path):
    succeed("import-orbax", write(tmp_path / "plain", weights), tmp_path / "run", "--config", run)
    same({p: np.asarray(x) for p, x in open_weights(tmp_path / "run").read().items()}, weights)


def test_another_dtype_is_reported(run, weights, tmp_path):
    ocp.save(tmp_path / "plain", nested({p: jnp.asarray(x, jnp.bfloat16) for p, x in weights.items()}))
    result = succeed("import-orbax", tmp_path / "plain", tmp_path / "run", "--config", run)
    assert "converting bfloat16 arrays to float32" in result.stderr


def test_every_difference_is_in_one_error(run, weights, tmp_path):
    tree = dict(weights)
    tree["decoder.norm.wieght"] = tree.pop("decoder.norm.weight")
    tree["decoder.head.weight"] = np.ones((3, 4), np.float32)
    ocp.save(tmp_path / "plain", nested(tree))
    text = refused("import-orbax", tmp_path / "plain", tmp_path / "run", "--config", run)
    assert "missing: decoder.norm.weight [16] (nearest: decoder.norm.wieght)" in text
    assert "unexpected: decoder.norm.wieght [16]" in text
    assert "differs: decoder.head.weight: [3, 4] stored, " in text
    assert not (tmp_path / "run").exists()


def test_what_is_no_checkpoint_is_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    succeed("export-orbax", run, tmp_path / "out")
    ocp.save_checkpointables(tmp_path / "several", {"a": {"x": jnp.ones(2)}, "b": {"x": jnp.ones(2)}})
    for directory, options, expected in (
        (tmp_path / "none", (), "has no Orbax checkpoint\n    got: files: none"),
        (tmp_path / "empty", (), "has no Orbax checkpoint"),
        (run / "checkpoints", (), "is a checkpoint of an axlearn run"),
        (tmp_path / "out", ("--step", 9), "of step 9\n    got: steps: 2"),
        (tmp_path / "out/2", ("--step", 2), "remove --step"),
        (
            tmp_path / "out",
            ("--item", "itemz"),
            "item 'itemz' does not exist\n    items: items\n    fix: set --item items",
        ),
        (tmp_path / "several", (), "which item has the parameters\n    items: a, b"),
    ):
        assert expected in refused("import-orbax", directory, tmp_path / "run", "--config", run, *options)
    assert "already exists" in refused("export-orbax", run, tmp_path / "out")
    assert "already exists" in refused("import-orbax", tmp_path / "out", run, "--config", run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Exception ignored in")  # of a coroutine that Orbax gives up
def test_a_damaged_file_of_plain_orbax_is_one_error(run, tmp_path):
    succeed("export-orbax", run, tmp_path / "out", "--no-compression")
    shutil.rmtree(tmp_path / "out/2/items/d")
    text = refused("import-orbax", tmp_path / "out", tmp_path / "run", "--config", run)
    assert f"Orbax cannot read {tmp_path}/out/2" in text
    gc.collect()  # what Orbax leaves behind is reported here and not in a later test


def test_paths_that_nested_dicts_cannot_hold_are_refused():
    with pytest.raises(RequestError, match=r"a\.b is both an array and a prefix"):
        nest({"a": 1, "a.b": 2})
    with pytest.raises(RequestError, match=r"a is both an array and a prefix"):
        nest({"a.b": 2, "a": 1})
