"""Sums over the positions of rows, with the logits of one chunk of positions in memory at a time.

Shapes: R rows, S positions per row, C positions per chunk, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Node
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_transformer.layer_roles import ExtraLossRole, LanguageModelRole


def check_language_model(model: Node[Any], path: str) -> None:
    """Raise `ConfigError` unless the config has the `LanguageModelRole` role, like a `causal-lm`.

    A model that is trained, at the path `objective`, must not have parameters that only its own loss trains.
    """
    if path == "objective" and isinstance(model, ExtraLossRole):
        raise ConfigError(
            Problem(
                path=path,
                message="this objective would not train all parameters of the model, because it does not use the model's loss",
                got=type(model).__qualname__,
                expected="a model without the role ExtraLossRole",
                fix="remove multi-token-prediction",
            )
        )
    if not isinstance(model, LanguageModelRole):
        raise ConfigError(
            Problem(
                path=path,
                message="this objective needs a language model with a decoder and logits",
                got=type(model).__qualname__,
                expected="a causal-lm, or another model with the role LanguageModelRole",
            )
        )


def sum_over_positions(function: Callable[..., Any], arrays: Any, chunk: int) -> Any:
    """Sum `function` over S. Computes C positions at a time, and recomputes them in the backward pass.

    Args:
        function: Function from arrays with C positions to a tree of [R, C]. It must return zero for zero padding.
        arrays: Tree of [R, S, ...]. It is padded with zeros to a multiple of C.
        chunk: Chunk size C.

    Returns:
        Tree of [R].
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[R, S, ...] -> [chunks, R, C, ...]."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def sums(part: Any) -> Any:
        return jax.tree.map(lambda v: jnp.sum(v, axis=1), function(part))

    parts = jax.tree.map(split, arrays)
    if count == 1:
        return sums(jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(sums, jax.tree.map(lambda x: x[0], parts))
    )
    total, _ = lax.scan(lambda carry, part: (jax.tree.map(jnp.add, carry, sums(part)), None), zeros, parts)
    return total


def log_probabilities(model: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int) -> jax.Array:
    """Return the weighted sum of the targets' log-probabilities for each row, in nats.

    Args:
        model: A causal language model.
        hidden: Output of its decoder, [R, S, D].
        targets: Target tokens, int32 [R, S].
        weights: Weights of the targets, float32 [R, S].
        chunk: Number of positions whose logits are in memory at a time.

    Returns:
        Float32 [R].
    """

    def chunk_log_probabilities(part: Any) -> jax.Array:
        hidden, targets, weights = part
        logits = model.logits(hidden).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
        return weights * (picked - jax.nn.logsumexp(logits, axis=-1))

    return sum_over_positions(chunk_log_probabilities, (hidden, targets, weights), chunk)
