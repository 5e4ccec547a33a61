"""Linear maps whose weight is stored as [outputs, inputs]."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import WEIGHT_FIRST_ROWS, Linear

FEW, MANY = 16, WEIGHT_FIRST_ROWS + 16


def linear(inputs=(24,), outputs=(4, 10), bias=True):
    axes = (*"i" * len(inputs), *"o" * len(outputs))
    cfg = Linear.Config(bias=bias)
    return cfg.build(
        input_dims=inputs, output_dims=outputs, axes=(None,) * len(axes), rngs=nnx.Rngs(0), precision=Precision()
    )


@pytest.mark.parametrize("rows", [1, FEW, MANY])
@pytest.mark.parametrize(("inputs", "outputs"), [((24,), (4, 10)), ((4, 6), (40,))])
def test_a_transposed_weight_gives_the_same(rows, inputs, outputs):
    plain, transposed = linear(inputs, outputs), linear(inputs, outputs)
    transposed.transpose()
    assert transposed.weight.shape == (40, 24)
    x = jax.random.normal(jax.random.key(0), (rows, 1, *inputs))
    np.testing.assert_allclose(transposed(x), plain(x), atol=1e-5)


@pytest.mark.parametrize(("rows", "first"), [(FEW, True), (MANY, False)])
def test_a_transposed_weight_is_the_first_factor_for_few_rows(rows, first):
    """XLA for CPU copies the second factor of a product at each call, and would turn the transposed product round."""
    one = linear(bias=False)
    one.transpose()
    graph, state = nnx.split(one)
    run = jax.jit(lambda state, x: jnp.tanh(nnx.merge(graph, state)(x)))
    program = run.lower(state, jnp.zeros((rows, 24))).compile().as_text()
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* (?:dot|custom-call|fusion)\([^\n]*dot_general", program)
    assert (("40", str(rows)) if first else (str(rows), "40")) in products
