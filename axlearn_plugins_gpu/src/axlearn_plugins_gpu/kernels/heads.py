"""Run attention kernels on each device's rows and heads."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device

QUERY = ("batch", None, "activation_heads", None)


def run_per_device(
    run: Callable[..., Any], query: jax.Array, key: jax.Array, value: jax.Array, *per_row: jax.Array | None
) -> jax.Array:
    """Call `run(query, key, value, *per_row)` on each device's shard.

    Args:
        run: Function of [b, Q, n, H], [b, K, g, H], [b, K, g, V] and the shards of `per_row`; returns [b, Q, n, V].
        query: [B, Q, N, H].
        key: [B, K, G, H]. If the G heads cannot be split the same way as the N heads, they are repeated until they can.
        value: [B, K, G, V].
        per_row: Arrays whose first dimension is B or 1, or None.
    """
    ways = count_shards(query.shape, QUERY)[2]
    repeats = ways // math.gcd(key.shape[2], ways)
    if repeats > 1:
        key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    rows = [None if x is None else ("batch" if x.shape[0] > 1 else None, *(None,) * (x.ndim - 1)) for x in per_row]
    return per_device(run, [QUERY, QUERY, QUERY, *rows], QUERY)(query, key, value, *per_row)
