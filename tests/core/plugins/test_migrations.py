"""Migrations that a plugin declares, for configs and for arrays."""

import pytest

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.checkpoint.manifest import ArrayInfo, Manifest
from axlearn_core.errors import CheckpointError, PluginError
from axlearn_core.plugins.migrations import migrate_arrays, migrate_config

HOOKS = """
from axlearn_core.contracts.migration import Migration
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_migrations():
    return [
        Migration(name="width", config="renaming:config"),
        Migration(name="paths", arrays="renaming:arrays"),
    ]
"""
RENAMING = """
def config(data):
    return {("width" if k == "size" else k): v for k, v in data.items()}


def arrays(stored, wanted):
    return {p: None if p == "gone" else p.replace("old.", "new.") for p in stored if p == "gone" or "old." in p}
"""


@pytest.fixture
def renaming(install):
    install(
        "axlearn-plugins-renaming",
        modules={"renaming_hooks": HOOKS, "renaming": RENAMING},
        points={"plugins": {"renaming": "renaming_hooks"}},
    )


@pytest.mark.usefixtures("renaming")
def test_configs_and_arrays_of_a_plugin():
    assert migrate_config({"size": 3, "type": "x"}) == {"width": 3, "type": "x"}
    assert migrate_arrays(["old.a", "b", "gone"], ["new.a", "b"]) == {"old.a": "new.a", "gone": None}


@pytest.mark.usefixtures("renaming")
def test_a_manifest_knows_where_an_array_is_stored():
    def info(path, dtype="float32"):
        return ArrayInfo(path, (2,), dtype)

    actual = Manifest(1, {p: info(p) for p in ("old.a", "b", "gone")}, {}, {})
    moved = actual.migrated(["new.a", "b"])
    assert moved.arrays == {"new.a": info("old.a"), "b": info("b")}
    assert actual.migrated(["b"]) is actual  # nothing is missing


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("part", ["params", "learner"])  # weights lie in files of their own
def test_a_checkpoint_is_restored_under_the_paths_of_today(part, tmp_path):
    import jax.numpy as jnp
    import numpy as np

    checkpointer = ShardedCheckpointer.Config().build(directory=tmp_path)
    checkpointer.save(1, {part: {"old": {"a": jnp.arange(3.0)}}, "b": jnp.ones(2), "gone": jnp.zeros(1)})
    checkpointer.wait()
    like = {part: {"new": {"a": jnp.zeros(3, jnp.bfloat16)}}, "b": jnp.zeros(2)}
    state, _ = checkpointer.restore(1, like)
    assert state[part]["new"]["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state[part]["new"]["a"].astype("float32"), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(state["b"], [1.0, 1.0])
    with pytest.raises(CheckpointError, match=r"differs: \w+\.new\.a"):
        checkpointer.restore(1, {part: {"new": {"a": jnp.zeros(4)}}, "b": jnp.zeros(2)})
    checkpointer.close()


def test_a_migration_that_is_missing_names_its_plugin(install):
    install(
        "axlearn-plugins-renaming",
        modules={"renaming_hooks": HOOKS},
        points={"plugins": {"renaming": "renaming_hooks"}},
    )
    with pytest.raises(PluginError, match=r"renaming[\s\S]*renaming:config"):
        migrate_config({"type": "x"})
