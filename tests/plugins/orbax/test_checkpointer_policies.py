"""Orbax's policies decide as the core's do, from the same fields."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.checkpoint.manifest import Manifest
from axlearn_core.checkpoint.retention import list_expired_steps
from axlearn_core.errors import ConfigError, RequestError, WorkError
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer

LOSSES = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf]))
FIELDS = st.fixed_dictionaries(
    {
        "keep_last": st.integers(1, 4),
        "keep_every": st.one_of(st.none(), st.integers(1, 6)),
        "keep_best": st.integers(0, 4),
        "best_mode": st.sampled_from(["min", "max"]),
    }
)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return lambda **fields: OrbaxCheckpointer.Config(**fields).build(directory=tmp_path_factory.mktemp("checkpoints"))


@settings(deadline=None, max_examples=200)
@given(losses=st.dictionaries(st.integers(1, 40), LOSSES, max_size=12), fields=FIELDS)
def test_they_keep_what_the_core_keeps(build, losses, fields):
    manifests = {
        step: Manifest(step, {}, {} if loss is None else {"eval_loss": loss}, {}) for step, loss in losses.items()
    }
    one = build(**fields)
    unwanted = one._list_expired_steps(manifests)
    one.close()
    assert unwanted == list_expired_steps(ShardedCheckpointer.Config(**fields), manifests)


def test_they_save_when_the_core_saves(build, tmp_path):
    one, core = build(every_steps=7), ShardedCheckpointer.Config(every_steps=7).build(directory=tmp_path)
    assert [one.due(s) for s in range(50)] == [core.due(s) for s in range(50)]
    one.close()
    core.close()


def test_a_store_that_orbax_cannot_reach_is_refused():
    problems = list(OrbaxCheckpointer.Config(uri="s3://bucket/run").validate())
    assert [(p.path, p.got) for p in problems] == [("uri", "s3://")]
    assert "checkpointer.type=sharded" in problems[0].fix
    for uri in (None, "runs/a", "/mnt/a", "file:///mnt/a", "gs://bucket/run"):
        assert not list(OrbaxCheckpointer.Config(uri=uri).validate())


@pytest.mark.parametrize("place", ["gs://bucket", "file:///runs", "/runs", "runs"])
@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "a#b", "a;b"])
def test_a_name_that_orbax_takes_for_something_else_is_refused(place, name):
    problems = list(OrbaxCheckpointer.Config(uri=f"{place}/{name}").validate())
    refused = place.startswith("gs://") or name in ("a[1]", "a*", "a?b")
    assert [p.path for p in problems] == ["uri"] * refused
    assert all(character in name for p in problems for character in p.got.split(", "))


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b"])
def test_unsupported_directory_names_are_rejected_before_training(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for directory in ("runs/a/checkpoints", tmp_path / name / "checkpoints", f"gs://bucket/{name}/checkpoints"):
        with pytest.raises(RequestError, match="Orbax loses or misplaces arrays"):
            OrbaxCheckpointer.Config().build(directory=directory)


def test_a_save_that_was_not_merged_fails(tmp_path, monkeypatch):
    one = OrbaxCheckpointer.Config(max_failed_saves=0).build(directory=tmp_path)
    merge = "orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files"

    async def skip(*args, **fields):
        pass

    monkeypatch.setattr(merge, skip)
    one.save(1, {"params": {"w": jnp.ones(2)}, "step": jnp.asarray(1)})
    with pytest.raises(WorkError, match="Orbax did not merge the arrays in state/weights/"):
        one.wait()
    assert one.steps() == []
    one.close()


@pytest.mark.slow_cases("a#b")
@pytest.mark.parametrize("name", ["a b", "a#b", "a;b", "a%20b", "ü"])
def test_a_local_path_has_another_name(name, tmp_path):
    state = {"params": {"w": jnp.ones((4, 2))}, "step": jnp.asarray(1)}
    one = OrbaxCheckpointer.Config().build(directory=tmp_path / name)
    one.save(1, state)
    one.wait()
    got, _ = one.restore(1, jax.eval_shape(lambda: state))
    assert (got["params"]["w"] == 1).all()
    assert [p.name for p in tmp_path.iterdir()] == [name]
    one.close()


def test_the_field_is_named_by_a_check_of_the_config():
    from axlearn_core.plugins.request import Request
    from axlearn_core.plugins.resolve import resolve

    request = Request.from_arguments("quickstart", set=["checkpointer={type: orbax, uri: 's3://bucket/run'}"])
    with pytest.raises(ConfigError, match=r"checkpointer\.uri: Orbax supports only local paths and gs://"):
        resolve(request).check()


@pytest.mark.slow
def test_orbax_is_imported_by_a_checkpointer_and_not_by_its_config():
    code = (
        "import sys; from axlearn_core.plugins.registry import registry\n"
        "config = registry().component('orbax')()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'orbax' and 'experimental' in m], 'imported'\n"
        "config.build(directory='unused').close()\n"
        "assert 'orbax.checkpoint.experimental.v1' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
