"""The gated short convolution of LFM2, against its formula and in parts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.nn.layer import Context, Precision
from axlearn_plugins_recurrent.convolution import ShortConvolution
from axlearn_plugins_recurrent.gated_convolution import GatedConvolution
from axlearn_plugins_transformer.cache_spec import empty_cache

WIDTH, LENGTH = 3, 12
LAYER = GatedConvolution.Config(
    input_dim=8, hidden_dim=6, convolution=ShortConvolution.Config(width=WIDTH, activation=None)
).build(rngs=nnx.Rngs(0), precision=Precision())
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, 8)), jnp.float32)


@jax.jit
def run(x, context, cache=None):
    return LAYER(x, context, cache)


def formula(x):
    """Compute the layer for a document [S, D] with NumPy."""
    value, input_gate, gate = (x @ np.asarray(part.weight[...]) for part in (LAYER.value, LAYER.input_gate, LAYER.gate))
    taps = np.asarray(LAYER.convolution.weight[...])
    inputs = np.concatenate([np.zeros((WIDTH - 1, 6)), value * input_gate])
    mixed = sum(inputs[i : i + len(x)] * taps[i] for i in range(WIDTH))
    return (gate * mixed) @ np.asarray(LAYER.output.weight[...])


def test_it_computes_its_formula_for_each_document():
    ids = jnp.asarray([[1] * 5 + [2] * 7, [1] * LENGTH], jnp.int32)
    y, cache = run(X, Context(segment_ids=ids))
    assert cache is None
    x = np.asarray(X)
    expected = [np.concatenate([formula(x[0, :5]), formula(x[0, 5:])]), formula(x[1])]
    np.testing.assert_allclose(y, np.stack(expected), atol=1e-5)


def test_parts_with_a_state_compute_the_same():
    cache, parts = empty_cache(LAYER.cache_spec(), 2, LENGTH), []
    for begin, end in ((0, 1), (1, 6), (6, LENGTH)):
        y, cache = run(X[:, begin:end], Context(), cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), run(X, Context())[0], atol=1e-6)


def test_padding_leaves_the_state_unchanged():
    cache = empty_cache(LAYER.cache_spec(), 2, LENGTH)
    real = jnp.broadcast_to(jnp.arange(LENGTH) < 7, (2, LENGTH))
    padded, exact = run(X, Context(real=real), cache)[1], run(X[:, :7], Context(), cache)[1]
    np.testing.assert_allclose(padded["convolution"], exact["convolution"], atol=1e-6)
