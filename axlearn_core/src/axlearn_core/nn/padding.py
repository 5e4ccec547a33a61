"""Which positions of a batch are tokens and which are padding, for statistics over positions.

Layers such as a feed-forward layer get activations and no batch, so the stack of layers puts the context of its rows in force
(`known_to_layers`), and a statistic asks for it. Nothing is computed unless one does. Shapes: B rows, S positions.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.nn.layer import Context

_in_force: contextvars.ContextVar[Context | None] = contextvars.ContextVar("axlearn_rows", default=None)


@contextlib.contextmanager
def known_to_layers(context: Context | None) -> Iterator[None]:
    """Puts the context of the rows in force for the layers that run within it."""
    token = _in_force.set(context)
    try:
        yield
    finally:
        _in_force.reset(token)


def tokens(rows: int, length: int) -> jax.Array | None:
    """Return a mask [B, S] that is True for tokens, or None if all positions count.

    They also all count in a layer that works on other positions than those of the batch, such as a pooled sequence. It can
    put a context of its own in force.
    """
    context = _in_force.get()
    real = None if context is None else context.tokens()
    if real is None or real.shape[0] != rows or real.shape[1] not in (1, length):
        return None
    return jnp.broadcast_to(real, (rows, length))


def rows(count: int) -> jax.Array | None:
    """Return a mask [B] that is True for rows with a token, or None if all rows count."""
    context = _in_force.get()
    real = None if context is None else context.tokens()
    return None if real is None or real.shape[0] != count else jnp.any(real, axis=1)


def up_to_the_last_target(weights: jax.Array) -> jax.Array:
    """Return a mask [B, S] of the tokens of rows that have target weights [B, S] and no segment ids.

    A prompt has weight 0 and tokens that count behind it. Padding has weight 0 up to the end of the row.
    """
    return lax.cummax((weights > 0).astype(jnp.int32), axis=1, reverse=True) > 0


def count(values: jax.Array) -> jax.Array:
    """Count the tokens that values [B, S] belong to, as a float32 scalar."""
    real = tokens(*values.shape)
    return jnp.float32(values.size) if real is None else jnp.sum(real, dtype=jnp.float32)


def mean(values: jax.Array) -> jax.Array:
    """Average [B, S] over the tokens. Returns 0 if there are none."""
    real = tokens(*values.shape)
    return jnp.mean(values) if real is None else masked_mean(values, real)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Average the values for which `mask`, of the same shape, is True. Returns 0 if there are none.

    With a mask of ones it has the bits of `jnp.mean`.
    """
    return jnp.mean(jnp.where(mask, values, 0)) * correction(mask)


def correction(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """The factor from a mean over all positions to one over the masked ones: exactly 1 for a mask of ones.

    A division by the count itself would not do: XLA multiplies by the reciprocal of a count that it knows.
    """
    size = mask.size if axis is None else mask.shape[axis]
    return jnp.float32(size) / jnp.maximum(jnp.sum(mask, axis=axis, dtype=jnp.float32), 1.0)
