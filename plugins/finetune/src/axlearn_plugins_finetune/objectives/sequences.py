"""Sums over the positions of rows, with the logits of only some positions in memory at a time.

Legend: R rows, S positions of a row, C positions of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Node
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_transformer.layer_roles import LanguageModelRole


def check_language_model(model: Node[Any], path: str) -> None:
    """Raises `ConfigError` unless the config has the role `LanguageModelRole`, as that of a `causal-lm` does."""
    if not isinstance(model, LanguageModelRole):
        raise ConfigError(
            Problem(
                path=path,
                message="this objective is for language models: it needs a decoder and its logits",
                got=type(model).__qualname__,
                expected="a causal-lm, or another model with the role LanguageModelRole",
            )
        )


def sum_over_positions(function: Callable[..., Any], arrays: Any, chunk: int) -> Any:
    """The sums over S of `function`, which is computed for C positions at a time and again in the backward pass.

    Args:
        function: (arrays with C positions) -> tree of [R, C].
        arrays: a tree of [R, S, ...]. What is padded behind S is zero, and `function` gives zero for it.
        chunk: C.

    Returns:
        A tree of [R].
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
    """The summed log-probability of the targets of each row, in nats.

    Args:
        model: a causal language model.
        hidden: [R, S, D], from its decoder.
        targets: int32 [R, S].
        weights: float32 [R, S].
        chunk: how many positions have their logits in memory at one time.

    Returns:
        float32 [R].
    """

    def of_targets(part: Any) -> jax.Array:
        hidden, targets, weights = part
        logits = model.logits(hidden).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
        return weights * (picked - jax.nn.logsumexp(logits, axis=-1))

    return sum_over_positions(of_targets, (hidden, targets, weights), chunk)
