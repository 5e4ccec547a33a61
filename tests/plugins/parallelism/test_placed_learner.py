"""Memory and dtype of the optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve
from support import toy_models


def program(*features):
    small = patch(toy_models.small("quickstart"), {"model.decoder.num_layers": 1})
    return compose(patch(resolve(small, with_=features).config, {"mesh": Mesh(shape={"fsdp": 8})}))


def stepped(*features):
    """Return the state and the losses after some steps on eight devices."""
    instance, losses = program(*features), []
    state = instance.init(0)
    for seed in range(3):
        state, scalars = instance.train_step(state, instance.put(toy_models.batch(seed)))
        losses.append(float(scalars["loss"]))
    return state, losses


def moments(state):
    return [x for x in jax.tree.leaves(state.learner.optimizer) if x.ndim]


def test_moments_stay_on_the_host_with_the_sharding_of_their_parameters():
    plain, other = program().state, program("offload-optimizer", "optimizer-precision").state
    assert {m.sharding.memory_kind for m in moments(other)} == {"pinned_host"}
    assert {m.dtype for m in moments(other)} == {jnp.dtype("bfloat16")}
    assert {m.sharding.memory_kind for m in moments(plain)} != {"pinned_host"}
    assert [m.sharding.spec for m in moments(other)] == [m.sharding.spec for m in moments(plain)]
    assert other.params == plain.params


@pytest.mark.slow
def test_a_run_keeps_them_there_and_its_losses_are_near():
    with toy_models.quick_to_compile():
        (state, other_losses), (_, losses) = stepped("offload-optimizer", "optimizer-precision"), stepped()
    assert {m.sharding.memory_kind for m in moments(state)} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in state.params.values()} == {"device"}
    assert other_losses[0] == losses[0]
    assert other_losses != losses, "the moments were rounded"
    np.testing.assert_allclose(other_losses, losses, rtol=1e-3)


@pytest.mark.slow
def test_offloading_changes_no_number():
    with toy_models.quick_to_compile():
        assert stepped("offload-optimizer")[1] == stepped()[1]


def test_a_dtype_that_there_is_not():
    with pytest.raises(ConfigError, match=r"not a dtype for optimizer state") as error:
        resolve("quickstart", with_=["offload-optimizer"], set={"learner.state_dtype": "bfloat"}).check()
    assert "did you mean: bfloat16" in str(error.value)
