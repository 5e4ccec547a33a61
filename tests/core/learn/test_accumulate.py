import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn_core.errors import ConfigError
from axlearn_core.learn import value_and_grad, without_state

B, S, D = 16, 5, 4


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def params(dtype=jnp.float32):
    return {"w": jnp.asarray(normal(0, (D, D)), dtype), "b": jnp.ones((D,), dtype)}


def batch(weights: bool = True):
    keys = jax.random.split(jax.random.key(1), 3)
    batch = {"x": jax.random.normal(keys[0], (B, S, D)), "y": jax.random.normal(keys[1], (B, S))}
    if weights:  # rows with few targets, and some with none
        batch["weights"] = (jax.random.uniform(keys[2], (B, S)) < jnp.linspace(0.0, 1.0, B)[:, None]).astype(
            jnp.float32
        )
    return batch


def loss(params, batch):
    """A mean over the weighted targets, as a language model's."""
    hidden = jnp.tanh(batch["x"] @ params["w"].astype(jnp.float32) + params["b"].astype(jnp.float32)[None, None])
    errors = (hidden.sum(-1) - batch["y"]) ** 2
    weight = batch["weights"].sum()
    safe = jnp.maximum(weight, 1.0)
    return (errors * batch["weights"]).sum() / safe, {
        "weight": weight,
        "error": (jnp.abs(hidden.sum(-1)) * batch["weights"]).sum() / safe,
    }


def split(loss, params, batch, parts):
    """((loss, summaries), gradients) in that many microbatches."""
    (value, summaries, _), grads = value_and_grad(without_state(loss), params, {}, batch, None, parts)
    return (value, summaries), grads


def close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.fast_cases("16", "4")
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_microbatches_equal_the_whole_batch(parts):
    got = jax.jit(lambda p, b: split(loss, p, b, parts))(params(), batch())
    close(got, jax.jit(jax.value_and_grad(loss, has_aux=True))(params(), batch()))
    assert got[0][1]["weight"] == batch()["weights"].sum()


def test_without_weights_every_microbatch_counts_the_same():
    def mean(params, batch):
        return jnp.mean((batch["x"] @ params["w"] + params["b"][None, None]) ** 2), {}

    got = split(mean, params(), batch(weights=False), 4)
    close(got, jax.value_and_grad(mean, has_aux=True)(params(), batch(weights=False)))


def test_each_microbatch_draws_random_numbers_of_its_own():
    def draw(params, variables, batch, key):
        drawn = jax.random.uniform(key)
        same = variables["same"] | (drawn == variables["last"])
        return drawn * params["b"].sum(), ({}, {"same": same, "last": drawn})

    variables = {"same": jnp.asarray(False), "last": jnp.float32(-1)}
    (_, _, after), _ = value_and_grad(draw, params(), variables, batch(), jax.random.key(3), 4)
    assert not after["same"]


def test_a_batch_of_padding_gives_zero_and_not_nan():
    empty = {**batch(), "weights": jnp.zeros((B, S))}
    (value, summaries), grads = split(loss, params(), empty, 4)
    assert value == 0
    assert summaries["weight"] == 0
    assert all((g == 0).all() for g in jax.tree.leaves(grads))


def test_sums_are_kept_in_float32_and_handed_back_in_the_gradients_dtype():
    low = params(jnp.bfloat16)
    (_, _), grads = split(loss, low, batch(), 16)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    exact = jax.grad(lambda p: loss(p, batch())[0])(jax.tree.map(lambda x: x.astype(jnp.float32), low))
    # 16 parts, each rounded to eight bits; summed in bfloat16 the rounding would add up.
    close(jax.tree.map(lambda x: x.astype(jnp.float32), grads), exact, 2e-2)


def test_a_number_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(ConfigError, match=r"accumulate_steps[^$]*3 microbatches of a batch of 16"):
        split(loss, params(), batch(), 3)


def test_a_sharded_batch_is_split_without_moving_rows_between_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(batch(), NamedSharding(mesh, P("data")))
    function = jax.jit(lambda p, b: split(loss, p, b, 2))
    compiled = function.lower(params(), sharded).compile().as_text()
    assert not [op for op in ("all-to-all", "all-gather", "collective-permute") if op in compiled]
    close(function(params(), sharded), jax.value_and_grad(loss, has_aux=True)(params(), batch()))
