"""Rows and gradients are sent to the experts and back, even if the load is uneven."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axlearn_plugins_moe.exchange import run_exchanged

DEVICES, HELD, ROWS = 4, 2, 6


@pytest.mark.fast_cases("all of one expert")
@pytest.mark.parametrize("choice", ["random", "all of one expert"])
def test_every_row_is_worked_on_by_its_expert_and_comes_back_to_its_place(choice):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(DEVICES * ROWS, 3)), jnp.float32)
    expert = rng.integers(0, DEVICES * HELD, DEVICES * ROWS) if choice == "random" else np.full(DEVICES * ROWS, 5)
    scale = jnp.asarray(rng.normal(size=DEVICES * HELD), jnp.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))

    def local(rows, expert, scale):
        def run(rows, owner):
            used = jnp.append(scale, 0.0)[owner][:, None]  # no row: the number behind the last expert
            return rows * used

        return run_exchanged(rows, expert, ("expert",), DEVICES, HELD, run)

    split = PartitionSpec("expert")
    spread = jax.shard_map(local, mesh=mesh, in_specs=(split, split, split), out_specs=split, check_vma=False)
    probe = jnp.asarray(rng.normal(size=rows.shape), jnp.float32)
    expert = jnp.asarray(expert, jnp.int32)

    def both(rows, scale, call):
        y = call(rows, expert, scale)
        return jnp.sum(y * probe), y

    for_each = jax.jit(jax.value_and_grad(lambda r, s: both(r, s, spread), (0, 1), has_aux=True))
    (_, y), grads = for_each(rows, scale)
    (_, expected), reference = jax.value_and_grad(
        lambda r, s: both(r, s, lambda rows, expert, scale: rows * scale[expert][:, None]), (0, 1), has_aux=True
    )(rows, scale)
    np.testing.assert_array_equal(y, expected)
    for gradient, right in zip(grads, reference, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-6, atol=1e-6)
