"""The interface between routers and dispatches, and the auxiliary losses of routers.

Statistics ignore padding; see `axlearn_core.nn.padding`.

B batch, S positions, D width, E experts, K experts per token, R assignments per row.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from axlearn_core.nn import padding


class Routing(NamedTuple):
    """Assignments of tokens to experts, one list per row.

    If capacity is short, earlier assignments win.

    Attributes:
        expert: Expert index, int32 [B, R].
        weight: Factor applied to the expert's output (or to its input, with `weigh_inputs`), float32 [B, R].
        token: Position in the row, int32 [B, R]. None if R = K * S and the list contains the first choices of all tokens, then
            the second choices of all tokens, and so on.
    """

    expert: jax.Array
    weight: jax.Array
    token: jax.Array | None = None


class Router(Protocol):
    """Chooses experts for tokens and adds its own auxiliary losses.

    It is built with `input_dim`, `num_experts`, `top_k`, `batch_invariant`, `rngs` and `precision`.
    """

    def __call__(self, x: jax.Array) -> Routing:
        """Route the tokens of [B, S, D]."""
        ...


def flatten_choices(experts: jax.Array) -> jax.Array:
    """Flatten [B, S, K] to [B, K * S], first choices first."""
    return jnp.moveaxis(experts, 2, 1).reshape(experts.shape[0], -1)


def assignment_mask(expert: jax.Array, length: int, token: jax.Array | None = None) -> jax.Array | None:
    """Return a mask that selects the assignments of real tokens, bool [B, R].

    Returns None if there is no padding. See `Routing` for `expert` and `token`.
    """
    real = padding.tokens(expert.shape[0], length)
    if real is None:
        return None
    if token is None:
        return jnp.tile(real, (1, expert.shape[1] // length))
    return jnp.take_along_axis(real, token, axis=1)


def count_assignments(expert: jax.Array, num_experts: int, counted: jax.Array | None = None) -> jax.Array:
    """Count the assignments per row and expert: int32 [B, R] -> float32 [B, E].

    Args:
        expert: Expert of each assignment, int32 [B, R].
        num_experts: E.
        counted: Mask of the assignments to count, bool [B, R]. None counts all of them.
    """
    chosen = jax.nn.one_hot(expert, num_experts, dtype=jnp.float32)
    return jnp.sum(chosen if counted is None else jnp.where(counted[..., None], chosen, 0), axis=1)


def load_balance_loss(expert: jax.Array, probabilities: jax.Array, *, per_row: bool = False) -> jax.Array:
    """Return the load-balance loss `E * sum(f_e * P_e)` (Fedus et al., 2021).

    It is 1 if the load is even and E if one expert gets every token.

    Args:
        expert: Experts of each token, int32 [B, R]. f_e is the fraction of assignments to expert e.
        probabilities: float32 [B, S, E], summing to 1 over the experts. P_e is their mean over the tokens.
        per_row: Compute f_e and P_e per row instead of over the batch, and average the losses of the rows (the
            sequence-wise loss of DeepSeek-V3). Rows that contain only padding do not count.
    """
    length, num_experts = probabilities.shape[1:]
    real = padding.tokens(expert.shape[0], length)
    share = count_assignments(expert, num_experts, assignment_mask(expert, length)) / expert.shape[1]
    mean = jnp.mean(probabilities if real is None else jnp.where(real[..., None], probabilities, 0), axis=1)
    if not per_row:
        share, mean = jnp.mean(share, axis=0, keepdims=True), jnp.mean(mean, axis=0, keepdims=True)
    if real is not None:
        over = padding.correction(real, axis=1)[:, None] if per_row else padding.correction(real)
        share, mean = share * over, mean * over
    loss = num_experts * jnp.mean(jnp.sum(share * mean, axis=-1))
    return loss if real is None or not per_row else loss * padding.correction(jnp.any(real, axis=1))


def z_loss(logits: jax.Array) -> jax.Array:
    """Return the mean of log(Z)^2 over the tokens of [B, S, E].

    See ST-MoE (Zoph et al., 2022).
    """
    return padding.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
