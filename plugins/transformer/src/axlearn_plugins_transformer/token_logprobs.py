"""Log-probabilities of tokens at a temperature, with the same bits in training and in sampling."""

import jax
import jax.numpy as jnp

MASKED_LOGIT = -1e30
"""Logit of a token that cannot be drawn."""


def scale_logits(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divide logits by a temperature.

    XLA computes a division by a broadcast value as a product with its inverse in some programs, and as a division in others. It may
    also fuse the product with the subtraction in a log-sum-exp, which then rounds once instead of twice. The explicit inverse and
    the select prevent both, so that every program computes the same bits.

    Args:
        logits: float32 [..., V].
        temperature: Positive; float32 [...], or a shape that broadcasts to it.

    Returns:
        float32 [..., V]. A temperature of 1 changes nothing.
    """
    temperature = temperature[..., None]
    return jnp.where(temperature == 1.0, logits, logits * (1.0 / temperature))


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the natural log-probabilities of tokens, and the log-sum-exp of the logits.

    Args:
        logits: float32 [..., V].
        tokens: int32 [...].

    Returns:
        Two arrays, float32 [...].
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode="clip")[..., 0] - total, total


def keep_tokens(logits: jax.Array, candidates: jax.Array, targets: jax.Array) -> jax.Array:
    """Mask the logits of the tokens that a draw left out.

    Args:
        logits: float32 [R, S, V].
        candidates: Tokens that could be drawn, int32 [R, S, W], padded with -1. If all are -1, every token could be drawn.
        targets: Drawn tokens, which are always kept, int32 [R, S].

    Returns:
        float32 [R, S, V].
    """
    rows, length, vocab = logits.shape
    tokens = jnp.concatenate([jnp.where(candidates < 0, vocab, candidates), targets[..., None]], axis=-1)
    row, place = jnp.arange(rows)[:, None, None], jnp.arange(length)[None, :, None]
    mask = jnp.zeros(logits.shape, bool).at[row, place, tokens].set(True, mode="drop")
    return jnp.where(mask | jnp.all(candidates < 0, axis=-1, keepdims=True), logits, MASKED_LOGIT)
