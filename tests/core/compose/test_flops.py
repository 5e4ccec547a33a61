"""FLOPs are counted from jaxprs as one counts them by hand."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.flops import count_flops, loop_carries

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


def loop_of_products(x, w, v):
    def body(carry, _):
        return jnp.tanh(carry @ w) @ v, None

    return jax.lax.scan(jax.checkpoint(body), x, None, length=3)[0].sum()


@pytest.mark.parametrize(
    ("trained", "products"),
    [
        (False, 6),  # the forward pass
        (True, 18),  # and the gradients of both operands of each product
        ((False, True, False), 15),  # v is frozen, so its three gradients are not needed
        ((False, False, True), 15),
        ((True, False, False), 12),  # all weights are frozen
    ],
)
def test_training_counts_only_the_gradients_that_it_needs(trained, products):
    square = jax.ShapeDtypeStruct((K, K), jnp.float32)
    assert count_flops(loop_of_products, X, square, square, trained=trained) == products * 2 * M * K * K


def test_what_precedes_every_trained_array_has_no_backward_pass():
    def model(x, first, second):
        return (x @ first @ second).sum()

    weights = (jax.ShapeDtypeStruct((K, N), jnp.float32), jax.ShapeDtypeStruct((N, K), jnp.float32))
    assert count_flops(model, X, *weights, trained=(False, False, True)) == 3 * PRODUCT  # 1 + 2


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["inline", "jit", "checkpoint"])
def test_products_that_the_loss_does_not_depend_on_have_no_gradient(wrap):
    def stopped(x, w):
        target = wrap(lambda x, w: x @ w)(x, w)
        return ((x @ w) * jax.lax.stop_gradient(target)).sum()

    def reported(x, w):
        return (x @ w).sum(), wrap(lambda x, w: x @ w)(x, w).sum()

    for function in (stopped, reported):
        assert count_flops(function, X, W, trained=(False, True)) == 3 * PRODUCT  # 2 + 1


@pytest.mark.parametrize(("trained", "products"), [((True, False), 3), ((False, True), 4), (True, 5), (False, 2)])
def test_gradients_of_branches_and_of_loops_of_unknown_length(trained, products):
    square = jax.ShapeDtypeStruct((K, K), jnp.float32)

    def model(x, w):
        _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))
        y = jax.lax.cond(y.sum() > 0, lambda y: y @ w, lambda y: y, y)
        return (jax.lax.stop_gradient(x) @ w).sum() + y.sum()

    assert count_flops(model, square, square, trained=trained) == products * 2 * K**3


@pytest.mark.parametrize("constants", [0, 2])
@pytest.mark.parametrize("carries", [1, 3])
@pytest.mark.parametrize("scanned", [0, 2])
def test_the_carried_values_of_a_scan_are_those_without_its_axis(constants, carries, scanned):
    weights, carry, xs = (jnp.ones(2),) * constants, (jnp.ones(2),) * carries, (jnp.ones((5, 2)),) * scanned

    def loop(weights, carry, xs):
        def step(carry, xs):
            change = sum((*weights, *xs), jnp.zeros(2))
            return tuple(c + change for c in carry), xs

        return jax.lax.scan(step, carry, xs, length=5)

    [scan] = [e for e in jax.make_jaxpr(loop)(weights, carry, xs).jaxpr.eqns if e.primitive.name == "scan"]
    assert loop_carries(scan, scan.params["jaxpr"].jaxpr) == (constants, carries)
