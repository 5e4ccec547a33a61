"""Activations with parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Precision
from axlearn_plugins_transformer.feed_forward import GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.learned_activation import XIELU

SIZES = {"input_dim": 4, "hidden_dim": 6}


def build(layer, **config):
    return layer.Config(**SIZES, **config).build(rngs=nnx.Rngs(0), precision=Precision())


def test_xielu_begins_with_its_settings_and_is_smooth_at_zero():
    x = jnp.linspace(-3, 3, 13)
    layer = XIELU.Config(positive=0.7, negative=0.9, beta=0.4).build(rngs=nnx.Rngs(0), precision=Precision())
    expected = np.where(x > 0, 0.7 * x * x + 0.4 * x, 0.9 * (np.exp(x) - 1 - x) + 0.4 * x)
    np.testing.assert_allclose(layer(x), expected, atol=2e-6)
    slopes = jax.vmap(jax.grad(lambda v: layer(v[None])[0]))(jnp.array([-1e-4, 1e-4]))
    np.testing.assert_allclose(slopes, 0.4, atol=1e-3)


def test_its_slopes_are_trained_and_its_constants_are_not():
    layer = build(PlainFeedForward, activation=XIELU.Config())
    names = {".".join(map(str, path)): type(v).__name__ for path, v in nnx.to_flat_state(nnx.state(layer))}
    assert {n.removeprefix("activation."): kind for n, kind in names.items() if "activation" in n} == {
        "alpha_positive": "Param", "alpha_negative": "Param", "beta": "FixedNumber", "eps": "FixedNumber"
    }  # fmt: skip
    gradients = nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 2, 4)))))(layer)
    assert float(jnp.abs(gradients["activation"]["alpha_positive"][...]).sum()) > 0


def test_a_gated_layer_refuses_an_activation_with_parameters():
    with pytest.raises(RequestError, match=r"has parameters[\s\S]*fix: use it in a `feed-forward` layer"):
        build(GatedFeedForward, activation=XIELU.Config())(jnp.ones((1, 2, 4)))
