"""What a router tells a dispatch, and the losses that keep routers in order.

Statistics count tokens only, no padding; see `axlearn_core.nn.padding`.

B batch, S positions, D width, E experts, K experts per token, R assignments per row.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from axlearn_core.nn import padding


class Routing(NamedTuple):
    """Assignments of tokens to experts: a list per row, in which earlier ones take precedence where room is short.

    Attributes:
        expert: int32 [B, R].
        weight: float32 [B, R], what the expert's output is multiplied with.
        token: int32 [B, R], the position in the row; None where R = K * S and the list holds the first choices of all
            tokens, then the second choices of all tokens, and so on.
    """

    expert: jax.Array
    weight: jax.Array
    token: jax.Array | None = None


class Router(Protocol):
    """Chooses experts. Built with `input_dim`, `num_experts`, `top_k`, `rngs`, `precision`.

    It adds its own auxiliary losses.
    """

    def __call__(self, x: jax.Array) -> Routing:
        """[B, S, D] -> the assignments."""
        ...


def by_choice(experts: jax.Array) -> jax.Array:
    """[B, S, K] -> [B, K * S], the first choices first."""
    return jnp.moveaxis(experts, 2, 1).reshape(experts.shape[0], -1)


def of_tokens(expert: jax.Array, length: int, token: jax.Array | None = None) -> jax.Array | None:
    """bool [B, R]: which assignments are those of tokens; None if all are. See `Routing` for the arguments."""
    real = padding.tokens(expert.shape[0], length)
    if real is None:
        return None
    if token is None:
        return jnp.tile(real, (1, expert.shape[1] // length))
    return jnp.take_along_axis(real, token, axis=1)


def counts(expert: jax.Array, num_experts: int, counted: jax.Array | None = None) -> jax.Array:
    """int32 [B, R] -> float32 [B, E]: how many assignments of each row an expert gets, of those that are `counted`."""
    chosen = jax.nn.one_hot(expert, num_experts, dtype=jnp.float32)
    return jnp.sum(chosen if counted is None else jnp.where(counted[..., None], chosen, 0), axis=1)


def load_balance_loss(expert: jax.Array, probabilities: jax.Array, *, per_row: bool = False) -> jax.Array:
    """`E * sum(f_e * P_e)` (Fedus et al., 2021): 1 where the load is even, E where one expert takes all.

    Args:
        expert: int32 [B, R], K assignments of each token; f_e is the share of them that expert e gets.
        probabilities: float32 [B, S, E], summing to 1 over the experts; P_e is their mean over the tokens.
        per_row: takes both over each row and averages the losses of the rows (the sequence-wise loss of DeepSeek-V3),
            instead of over the batch. Rows of padding alone do not count.
    """
    length, num_experts = probabilities.shape[1:]
    real = padding.tokens(expert.shape[0], length)
    share = counts(expert, num_experts, of_tokens(expert, length)) / expert.shape[1]
    mean = jnp.mean(probabilities if real is None else jnp.where(real[..., None], probabilities, 0), axis=1)
    if not per_row:
        share, mean = jnp.mean(share, axis=0, keepdims=True), jnp.mean(mean, axis=0, keepdims=True)
    if real is not None:
        over = padding.correction(real, axis=1)[:, None] if per_row else padding.correction(real)
        share, mean = share * over, mean * over
    loss = num_experts * jnp.mean(jnp.sum(share * mean, axis=-1))
    return loss if real is None or not per_row else loss * padding.correction(jnp.any(real, axis=1))


def z_loss(logits: jax.Array) -> jax.Array:
    """The mean of log(Z)^2 over the tokens of [B, S, E] (Zoph et al., 2022, "ST-MoE")."""
    return padding.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
