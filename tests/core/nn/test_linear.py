"""`Linear`: the product of its last input dimensions, as one matrix or with its dimensions apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear, linear_product
from axlearn_core.nn.sharding import logical_rules

DIMS = [((24,), (4, 10)), ((4, 6), (40,)), ((4, 6), (5, 8))]


def linear(inputs, outputs, **options):
    axes = (None,) * (len(inputs) + len(outputs))
    return Linear.Config(**options).build(
        input_dims=inputs, output_dims=outputs, axes=axes, rngs=nnx.Rngs(0), precision=Precision()
    )


@pytest.mark.slow_cases("inputs0-outputs0-False", "inputs1-outputs1-False")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), DIMS)
def test_the_last_dimensions_are_summed(inputs, outputs, bias):
    one, x = linear(inputs, outputs, bias=bias), jax.random.normal(jax.random.key(0), (3, 2, *inputs))
    if bias:
        one.bias[...] = jnp.arange(np.prod(outputs), dtype=jnp.float32).reshape(outputs)
    expected = np.tensordot(x, one.weight[...], len(inputs)) + (np.asarray(one.bias[...]) if bias else 0)
    np.testing.assert_allclose(one(x), expected, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), DIMS)
def test_sharded_dimensions_are_not_mixed(inputs, outputs):
    x, weight = jnp.ones((3, 2, *inputs)), jnp.ones((*inputs, *outputs))

    def text_of_program():
        return str(jax.make_jaxpr(lambda x, weight: linear_product(x, weight, len(inputs)))(x, weight))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    with logical_rules(mesh, {}):
        apart = text_of_program()
    assert "reshape" not in apart
    assert "reshape" in text_of_program()
