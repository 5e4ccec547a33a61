"""Compute gradients over a batch, optionally in microbatches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.contracts.parts import Loss
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.summary import is_summary


def without_state(loss: Callable[[Any, Any], tuple[jax.Array, Mapping[str, jax.Array]]]) -> Loss:
    """Adapt a stateless `loss(params, batch) -> (mean, summaries)` to the `Loss` protocol."""

    def stateful(params: object, variables: object, batch: object, key: object) -> Any:
        value, summaries = loss(params, batch)
        return value, (summaries, variables)

    return stateful


def value_and_grad(
    loss: Loss,
    params: object,
    variables: object,
    batch: object,
    key: jax.Array | None = None,
    num_microbatches: int = 1,
) -> Any:
    """Return `((loss, summaries, variables), grads)` for the mean loss over a batch.

    A scan runs the microbatches sequentially, so only the activations of one microbatch are live. Each microbatch is weighted by
    `summaries["weight"]`, the number of targets in its mean (default: 1), so the result equals the result for the whole batch.
    `weight` is summed, and the other scalars are averaged with the same weights. An `axlearn_core.nn.summaries.Summary` defines
    how it is combined. Each microbatch receives the variables of the previous one and draws different random numbers.

    Args:
        loss: See `contracts.parts.Loss`.
        params: Parameters to differentiate.
        variables: Arrays keyed by path, before the step.
        batch: Pytree of arrays [B, ...].
        key: Key for the step, or None if the model draws no random numbers.
        num_microbatches: Number of microbatches K, a divisor of B. Microbatch k consists of rows k, k + K, ..., so that
            every device that holds rows of the batch works on each microbatch.

    Raises:
        ConfigError: If K does not divide B.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if num_microbatches == 1:
        (value, (summaries, variables)), grads = grad(params, variables, batch, key)
        return (value, summaries, variables), grads

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % num_microbatches:
            raise ConfigError(
                Problem(
                    path="learner.accumulate_steps",
                    message="does not divide the batch",
                    got=f"{num_microbatches} microbatches of a batch of {x.shape[0]}",
                    fix="change it or input.batch_size",
                )
            )
        return jnp.swapaxes(x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:]), 0, 1)

    parts = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], parts)
    (value, (summaries, _)), grads = jax.eval_shape(grad, params, variables, first, key)
    has_weight = "weight" in summaries
    like = (value, {k: v for k, v in summaries.items() if k != "weight" and not is_summary(v)}, grads)
    zeros, empty = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, _sum_type(x)), tree)
        for tree in (like, {k: v for k, v in summaries.items() if is_summary(v)})
    )

    def body(carry: Any, numbered: Any) -> tuple[Any, None]:
        (sums, merged, total, variables), (part, index) = carry, numbered
        part_key = None if key is None else jax.random.fold_in(key, index)
        (value, (summaries, variables)), grads = grad(params, variables, part, part_key)
        summaries = dict(summaries)
        weight = jnp.asarray(summaries.pop("weight", 1.0), jnp.float32)
        merged = {k: s.merged(summaries.pop(k)) for k, s in merged.items()}
        add = lambda s, x: s + x.astype(s.dtype) * weight.astype(s.dtype)  # noqa: E731
        return (jax.tree.map(add, sums, (value, summaries, grads)), merged, total + weight, variables), None

    indices = None if key is None else jnp.arange(num_microbatches, dtype=jnp.uint32)
    carry = (zeros, empty, jnp.zeros((), jnp.float32), variables)
    (sums, merged, total, variables), _ = jax.lax.scan(body, carry, (parts, indices))
    divisor = jnp.where(total == 0, jnp.ones_like(total), total)
    value, summaries, grads = jax.tree.map(lambda s, x: (s / divisor.astype(s.dtype)).astype(x.dtype), sums, like)
    summaries = {**summaries, **merged}
    return (value, {**summaries, "weight": total} if has_weight else summaries, variables), grads


def _sum_type(x: jax.Array) -> Any:
    """Return the dtype for sums: float64 for float64 gradients, and float32 otherwise."""
    return jnp.dtype(x.dtype if x.dtype == jnp.float64 else jnp.float32)
