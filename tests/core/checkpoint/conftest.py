"""A small training state with everything that a real one holds."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn_core.errors import WorkError
from axlearn_core.plugins.registry import registry


@pytest.fixture(scope="session")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def state(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    return {
        "step": jax.device_put(jnp.int32(3), whole),
        "rng": keys,
        "params": {
            "decoder.norm.scale": jax.device_put(jnp.linspace(-1e-38, 3e38, 8), whole),
            "decoder.up.weight": jax.device_put(jax.random.normal(keys[0], (16, 4)), split),
        },
        "learner": (jax.device_put(jax.random.normal(keys[1], (16, 4), jnp.bfloat16), split), jnp.zeros((0, 4))),
    }


@pytest.fixture(params=["sharded", "orbax"])
def kind(request):
    """The component name of the checkpointer under test."""
    return request.param


@pytest.fixture
def make(kind, tmp_path):
    """`make(**fields)` builds a checkpointer; all are closed at the end."""
    checkpointers = []

    def build(directory=tmp_path / "checkpoints", **fields):
        checkpointers.append(registry().component(kind)(**fields).build(directory=directory))
        return checkpointers[-1]

    yield build
    for one in checkpointers:
        with contextlib.suppress(WorkError):  # a save that a test let fail
            one.close()
