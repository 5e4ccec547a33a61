"""Padding masks for statistics over positions.

A feed-forward layer receives activations, but not the batch, so it does not know which positions are padding. The layer
stack therefore activates the context of its rows (`use_context`), and functions that compute statistics look it up.
Masks are computed only on demand. Shapes: B rows, S positions.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.nn.layer import Context

_active: contextvars.ContextVar[Context | None] = contextvars.ContextVar("axlearn_rows", default=None)


@contextlib.contextmanager
def use_context(context: Context | None) -> Iterator[None]:
    """Make the context of the rows available to the layers that run inside this context manager."""
    token = _active.set(context)
    try:
        yield
    finally:
        _active.reset(token)


def tokens(rows: int, length: int) -> jax.Array | None:
    """Return a mask [B, S] that is True for tokens, or None if all positions count.

    All positions also count in a layer whose positions differ from the batch's positions, as after pooling. Such a
    layer can activate its own context.
    """
    context = _active.get()
    real = None if context is None else context.tokens()
    if real is None or real.shape[0] != rows or real.shape[1] not in (1, length):
        return None
    return jnp.broadcast_to(real, (rows, length))


def rows(count: int) -> jax.Array | None:
    """Return a mask [B] that is True for rows that contain a token, or None if all rows count."""
    context = _active.get()
    real = None if context is None else context.tokens()
    return None if real is None or real.shape[0] != count else jnp.any(real, axis=1)


def make_token_mask(weights: jax.Array) -> jax.Array:
    """Return a token mask [B, S] for rows without segment ids, given the weights [B, S] of their targets.

    Prompts also have weight 0, but later tokens have positive weights. Padding has weight 0 up to the end of the row.
    """
    return lax.cummax((weights > 0).astype(jnp.int32), axis=1, reverse=True) > 0


def count(values: jax.Array) -> jax.Array:
    """Return the number of tokens among values [B, S] as a float32 scalar."""
    real = tokens(*values.shape)
    return jnp.float32(values.size) if real is None else jnp.sum(real, dtype=jnp.float32)


def mean(values: jax.Array) -> jax.Array:
    """Average values [B, S] over tokens. Return 0 if all positions are padding."""
    real = tokens(*values.shape)
    return jnp.mean(values) if real is None else masked_mean(values, real)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Average the values where a mask of the same shape is True. Return 0 if the mask is all False.

    If the mask is all True, the result is bit-identical to `jnp.mean`.
    """
    return jnp.mean(jnp.where(mask, values, 0)) * correction(mask)


def correction(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the factor that converts a mean over all positions to a masked mean: exactly 1 if the mask is all True.

    Dividing by the count would change the bits, because XLA replaces division by a constant with multiplication.
    """
    size = mask.size if axis is None else mask.shape[axis]
    return jnp.float32(size) / jnp.maximum(jnp.sum(mask, axis=axis, dtype=jnp.float32), 1.0)
