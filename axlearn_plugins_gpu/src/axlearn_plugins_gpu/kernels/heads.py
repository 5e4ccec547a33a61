"""Attention kernels run by every device on its own rows and heads."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

QUERY = ("batch", None, "activation_heads", None)


def by_heads(
    run: Callable[..., Any], query: jax.Array, key: jax.Array, value: jax.Array, *by_row: jax.Array | None
) -> jax.Array:
    """`run(query, key, value, *by_row)` on each device's part.

    Args:
        run: takes [b, Q, n, H], [b, K, g, H], [b, K, g, V] and what comes after them; gives [b, Q, n, V].
        query: [B, Q, N, H].
        key: [B, K, G, H]. Where N heads are split and G are not, they are repeated until they can be split the same way.
        value: [B, K, G, V].
        by_row: arrays whose first dimension is B or 1, or None.
    """
    ways = parts_of(query.shape, QUERY)[2]
    repeats = ways // math.gcd(key.shape[2], ways)
    if repeats > 1:
        key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    rows = [None if x is None else ("batch" if x.shape[0] > 1 else None, *(None,) * (x.ndim - 1)) for x in by_row]
    return per_device(run, [QUERY, QUERY, QUERY, *rows], QUERY)(query, key, value, *by_row)
