"""Checkpoints that plain Orbax wrote into the directory of a run."""

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.errors import CheckpointError
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer

# Plain Orbax takes shardings from the files if it is not told any, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def state(step):
    return {
        "step": jnp.asarray(step),
        "params": {"a.weight": jnp.full((4, 2), step, jnp.float32), "b": jnp.ones((3,), jnp.bfloat16)},
        "learner": [jnp.arange(3), {"count": jnp.asarray(step)}],
    }


LIKE = jax.eval_shape(lambda: state(0))


@pytest.fixture
def make(tmp_path):
    checkpointers = []

    def build(**fields):
        checkpointers.append(OrbaxCheckpointer.Config(**fields).build(directory=tmp_path / "checkpoints"))
        return checkpointers[-1]

    yield build
    for one in checkpointers:
        one.close()


def save_plainly(make, step, tree):
    with ocp.training.Checkpointer(make().directory) as plain:
        assert plain.save(step, tree, force=True)


def equal(got, expected):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), got, expected))


def test_they_are_listed_and_restored_with_a_note(make, caplog):
    one = make()
    one.save(2, state(2))
    one.wait()
    save_plainly(make, 5, state(5))
    again = make()
    assert again.steps() == [2, 5]
    got, extra = again.restore(5, LIKE)
    assert equal(got, state(5))
    assert extra == {}
    assert "step 5 in" in caplog.text
    assert "cannot be verified" in caplog.text
    caplog.clear()
    assert equal(again.restore(2, LIKE)[0], state(2))
    assert not caplog.text


def test_one_with_weights_only_begins_a_run(make):
    tree = {"step": jnp.asarray(7), "params": state(7)["params"], "variables": {}}
    save_plainly(make, 7, {k: v for k, v in tree.items() if v is not tree["variables"]})
    like = {**LIKE, "variables": {}}
    got, extra = make().restore(7, like)
    assert extra == {"weights_only": True}
    assert equal(got["params"], state(7)["params"])
    assert got["learner"] == LIKE["learner"]


def test_one_of_another_model_is_refused_with_every_difference(make):
    save_plainly(make, 5, {**state(5), "params": {"a.weigth": jnp.ones((4, 2)), "b": jnp.ones((4,), jnp.bfloat16)}})
    with pytest.raises(CheckpointError) as error:
        make().restore(5, LIKE)
    text = str(error.value)
    assert "missing: params.a.weight float32[4,2] (nearest: params.a.weigth)" in text
    assert "unexpected: params.a.weigth" in text
    assert "differs: params.b: the checkpoint has bfloat16[4], expected bfloat16[3]" in text


def test_they_are_never_deleted(make):
    save_plainly(make, 1, state(1))
    one = make(keep_last=1)
    one.run = "ours"
    for step in (2, 3):
        one.save(step, state(step))
    one.wait()
    assert one.steps() == [1, 3]


def test_a_manifest_that_is_lost_is_damage_and_no_step_of_plain_orbax(make):
    one = make()
    for step in (1, 2):
        one.save(step, state(step))
    one.wait()
    (one.directory / "2/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step 2 in [^$]*manifest.json: No such file[^$]*--restore-step 1"):
        make().restore(2, LIKE)


def test_some_arrays_are_read_and_only_their_files_compared(make):
    one = make()
    one.save(1, state(1))
    one.wait()
    others = max((one.directory / "1/state/others").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    others.write_bytes(b"damaged")

    def read(one, path):
        return one.reader(one.inspect(1)).read({path: None})

    got = read(one, "params.a.weight")
    assert list(got) == ["params.a.weight"]
    assert (got["params.a.weight"] == 1).all()
    with pytest.raises(CheckpointError, match="state/others/"):
        read(one, "step")


@pytest.mark.slow_cases("False-True-True", "True-False-False", "True-False-True")
@pytest.mark.parametrize("compression", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_plain_orbax_reads_the_arrays_of_a_run(make, ocdbt, zarr3, compression):
    one = make(ocdbt=ocdbt, zarr3=zarr3, compression=compression)
    one.save(1, state(1))
    one.wait()
    items = ocp.load_checkpointables(one.directory / "1/state")
    assert set(items) == {"weights", "others"}
    assert (items["weights"]["params.a.weight"] == 1).all()
    assert items["weights"]["params.b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_copies_in_host_memory_are_bounded_and_whole(make, limit):
    one = make(max_host_bytes=limit)
    one.save(1, state(1))
    one.wait()
    assert equal(one.restore(1, LIKE)[0], state(1))


def test_the_core_refuses_it_by_name(make):
    one = make()
    one.save(1, state(1))
    one.wait()
    core = ShardedCheckpointer.Config().build(directory=one.directory)
    with pytest.raises(CheckpointError, match="a different checkpointer wrote the checkpoint of step 1"):
        core.restore(1, LIKE)
    core.close()
