"""Checkpoints in Google Cloud Storage, on an emulator."""

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.checkpoint import open_storage
from axlearn_core.errors import CheckpointError
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from support.needs import needs

pytestmark = needs("gcsfs")


def state(step):
    return {"params": {"w": jnp.full((64, 8), step, jnp.int32)}, "step": jnp.asarray(step)}


@pytest.fixture
def make(gs):
    checkpointers = []

    def build(**fields):
        checkpointers.append(OrbaxCheckpointer.Config(uri=f"{gs}/run", **fields).build(directory="unused"))
        checkpointers[-1].run = "ours"
        return checkpointers[-1]

    yield build
    for one in checkpointers:
        one.close()


@pytest.mark.slow
def test_steps_are_saved_pruned_verified_and_read(make):
    one = make(keep_last=2)
    for step in (1, 2, 3):
        assert one.save(step, state(step), extra={"data": step})
    one.wait()
    assert make().steps() == [2, 3]
    got, extra = make().restore(3, jax.eval_shape(lambda: state(0)))
    assert extra == {"data": 3}
    assert (got["params"]["w"] == 3).all()
    assert got["step"] == 3


@pytest.mark.slow
def test_damage_is_found_and_an_unfinished_step_is_not_listed(make, gs):
    one = make()
    for step in (1, 2):
        one.save(step, state(step))
    one.wait()
    storage = open_storage(f"{gs}/run")
    name = max((f for f in storage.list("2/state/")), key=lambda f: f.bytes).path
    data = bytearray(storage.read(name))
    data[len(data) // 2] ^= 1
    storage.write(name, [bytes(data)])
    with pytest.raises(CheckpointError, match=r"step 2 in gs://[^$]*state/.*: got sha256[^$]*--restore-step 1"):
        make().restore(2, jax.eval_shape(lambda: state(0)))
    storage.delete("2/manifest.json")
    again = make()
    assert again.steps() == [1]
    assert again.save(2, state(5))  # what was cut off is replaced
    again.wait()
    got, _ = again.restore(2, jax.eval_shape(lambda: state(0)))
    assert (got["params"]["w"] == 5).all()
