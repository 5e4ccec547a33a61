"""Sums and maps over the positions of rows, with the logits of one chunk of positions in memory at a time.

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
from axlearn_plugins_transformer.token_logprobs import token_logprobs


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

    @jax.checkpoint
    def sums(part: Any) -> Any:
        return jax.tree.map(lambda v: jnp.sum(v, axis=1), function(part))

    parts, count = _split_positions(arrays, chunk)
    if count == 1:
        return sums(jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(sums, jax.tree.map(lambda x: x[0], parts))
    )
    total, _ = lax.scan(lambda carry, part: (jax.tree.map(jnp.add, carry, sums(part)), None), zeros, parts)
    return total


def map_over_positions(function: Callable[..., Any], arrays: Any, chunk: int) -> Any:
    """Apply `function` to C positions at a time, and recompute its intermediate results in the backward pass.

    Args:
        function: Function from arrays with C positions to a tree of [R, C].
        arrays: Tree of [R, S, ...].
        chunk: Chunk size C.

    Returns:
        Tree of [R, S].
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    parts, count = _split_positions(arrays, chunk)
    if count == 1:
        return jax.checkpoint(function)(jax.tree.map(lambda x: x[0], parts))
    results = lax.map(jax.checkpoint(function), parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length], results)


def _split_positions(arrays: Any, chunk: int) -> tuple[Any, int]:
    """Split arrays [R, S, ...], padded with zeros, into [chunks, R, C, ...]. Also return the number of chunks."""
    length = jax.tree.leaves(arrays)[0].shape[1]
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, arrays), count


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
        return weights * token_logprobs(model.logits(hidden).astype(jnp.float32), targets)[0]

    return sum_over_positions(chunk_log_probabilities, (hidden, targets, weights), chunk)
