"""The factor of `query-temperature` at each position."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn.layer import Precision
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention import bias_of
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.attention_variants.temperature import QueryTemperature

POSITIONS = jnp.arange(9, dtype=jnp.int32)[None]


def build(cfg):
    return cfg.build(rngs=nnx.Rngs(0), precision=Precision(), head_dim=4, num_heads=2)


@pytest.mark.parametrize("shift", [0, 1])
def test_later_queries_get_larger_factors(shift):
    layer = build(QueryTemperature.Config(interval=4, scale=0.5, shift=shift))
    query, key = jnp.ones((1, 9, 2, 4), jnp.bfloat16), jnp.ones((1, 9, 1, 4), jnp.bfloat16)
    q, k = layer(query, key, POSITIONS)
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(k, key)
    factors = [1 + 0.5 * np.log1p((position + shift) // 4) for position in range(9)]
    assert factors[3 - shift] == 1 < factors[4 - shift]
    np.testing.assert_allclose(np.asarray(q[0, :, 1, 2], np.float32), factors, rtol=4e-3)


def test_the_inner_encoding_is_applied_first():
    rotary = RotaryEmbedding.Config(theta=100.0)
    query = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 2, 4)), jnp.float32)
    q, k = build(QueryTemperature.Config(interval=4, scale=0.5, inner=rotary))(query, query, POSITIONS)
    rotated, _ = build(rotary)(query, query, POSITIONS)
    factors = 1 + 0.5 * np.log1p((np.arange(9) + 1) // 4)
    np.testing.assert_array_equal(k, rotated)
    np.testing.assert_allclose(q, rotated * factors[None, :, None, None], rtol=1e-6)


def test_a_score_bias_of_the_inner_encoding_remains():
    assert bias_of(build(QueryTemperature.Config())) is None
    assert bias_of(build(QueryTemperature.Config(inner=Alibi.Config()))) == bias_of(build(Alibi.Config()))
