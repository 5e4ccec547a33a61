"""FLOPs are counted from jaxprs as one counts them by hand."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.flops import count_flops

M, K, N, GROUPS = 64, 8, 16, 4
X = jax.ShapeDtypeStruct((M, K), jnp.float32)
W = jax.ShapeDtypeStruct((K, N), jnp.float32)
PRODUCT = 2 * M * K * N


def grouped(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes).sum()


def test_a_grouped_product_and_both_of_its_gradients_take_each_row_once():
    weights = jax.ShapeDtypeStruct((GROUPS, K, N), jnp.float32)
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    assert count_flops(grouped, X, weights, sizes) == PRODUCT
    assert count_flops(jax.grad(grouped, argnums=(0, 1)), X, weights, sizes) == 3 * PRODUCT


def custom_batching(function):
    batched_function = jax.custom_batching.custom_vmap(function)
    batched_function.def_vmap(lambda size, batched, *args: (jax.vmap(function, batched)(*args), True))
    return batched_function


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, custom_batching], ids=lambda w: w.__name__)
def test_what_is_called_counts(wrap):
    assert count_flops(wrap(lambda x, w: x @ w), X, W) == PRODUCT


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return jax.lax.scan(lambda total, _: (total + (x @ w).sum(), None), 0.0, length=5)[0]

    assert count_flops(loop, X, W) == 5 * PRODUCT


def test_axes_that_a_shard_map_leaves_to_the_compiler_count_once():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("stages", "rows"))
    whole, rows = jax.sharding.PartitionSpec("stages"), jax.sharding.PartitionSpec(("stages", "rows"))
    x = jnp.ones((8, 16, 16))

    def on(axes, spec):
        return jax.shard_map(
            lambda x: x @ x, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )

    expected = count_flops(lambda x: x @ x, x)
    assert count_flops(on({"stages"}, whole), x) == expected
    assert count_flops(on({"stages", "rows"}, rows), x) == expected
