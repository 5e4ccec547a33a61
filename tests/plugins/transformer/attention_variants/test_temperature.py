"""The factor of `query-temperature` at each position."""

import jax.numpy as jnp
import numpy as np

from axlearn_core.nn.layer import Precision
from axlearn_plugins_transformer.attention_variants.temperature import QueryTemperature


def test_later_queries_get_larger_factors():
    layer = QueryTemperature.Config(interval=4, scale=0.5).build(precision=Precision())
    query, key = jnp.ones((1, 9, 2, 3), jnp.bfloat16), jnp.ones((1, 9, 1, 3), jnp.bfloat16)
    q, k = layer(query, key, jnp.arange(9, dtype=jnp.int32)[None])
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(k, key)
    factors = [1 + 0.5 * np.log1p((position + 1) // 4) for position in range(9)]
    assert factors[2] == 1 < factors[3]
    np.testing.assert_allclose(np.asarray(q[0, :, 1, 2], np.float32), factors, rtol=4e-3)
