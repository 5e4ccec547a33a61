"""Interfaces of the terms that `policy-gradient` composes. Another package may implement any of them.

Shapes: R rows, S positions per row, D width. See `drawn_tokens.DrawnTokens` for the arrays.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from axlearn_core.config.offers import offers
from axlearn_core.contracts.parts import Batch
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens


@offers()
class Ratio(Protocol):
    """Compares the trained model with the policy that drew the tokens."""

    def ratios(self, tokens: DrawnTokens) -> jax.Array:
        """Return the probability ratio of each target, with gradients, float32 [R, S]."""
        ...


@offers()
class Clip(Protocol):
    """Limits how far one step moves the policy."""

    def surrogate(self, ratios: jax.Array, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """Return the objective to maximize, and mark the targets that the limit affects.

        Args:
            ratios: Result of `Ratio.ratios`.
            tokens: The targets.

        Returns:
            Objective of each target, float32 [R, S], and bool [R, S].
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Divergence from the reference. All arrays are float32 [R, S].

    Attributes:
        estimates: Estimate of the KL divergence for each target, for the summary `kl`.
        loss: Term of the loss, with gradients.
        reward: Term of the reward, without gradients.
    """

    estimates: jax.Array
    loss: jax.Array
    reward: jax.Array


@offers()
class Penalty(Protocol):
    """Keeps the policy close to a reference."""

    def compute(self, tokens: DrawnTokens, reference_logprobs: jax.Array, ratios: jax.Array) -> Divergence:
        """Return the divergence of the policy from the reference.

        Args:
            tokens: The targets.
            reference_logprobs: Log-probabilities of the targets under the reference, without gradients, float32 [R, S].
            ratios: Result of `Ratio.ratios`.
        """
        ...


@offers()
class Correction(Protocol):
    """Corrects for the difference between the policy that drew the tokens and the trained model."""

    def factors(self, tokens: DrawnTokens) -> jax.Array:
        """Return a factor for the objective of each target, without gradients, float32 [R, S]."""
        ...


@offers()
class LossMean(Protocol):
    """Averages the terms of the targets."""

    def spread(self, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """Return the weight of each target, float32 [R, S], and the divisor of their sum, a float32 scalar.

        The divisor of a batch must be the sum of the divisors of its rows, so that microbatches combine to the same mean.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Criticism:
    """Result of a critic. All arrays are float32 [R, S].

    Attributes:
        advantages: Advantages, without gradients.
        loss: Loss of the values, with gradients.
        summaries: Values to average over the targets and log, by name.
    """

    advantages: jax.Array
    loss: jax.Array
    summaries: Mapping[str, jax.Array]


@offers("rngs", "model")
class Critic(Protocol):
    """Estimates values, and computes advantages from rewards. An `nnx.Module` whose parameters are trained."""

    def assess(self, hidden: jax.Array, batch: Batch, rewards: jax.Array, tokens: DrawnTokens) -> Criticism:
        """Return advantages and the loss of the values.

        Args:
            hidden: Hidden states of the trained model, [R, S, D].
            batch: The batch.
            rewards: Reward of each target, float32 [R, S].
            tokens: The targets. Their advantages are not used.
        """
        ...


@offers("rngs", "model")
class ValueModel(Protocol):
    """Predicts the return from each position. An `nnx.Module` whose parameters are trained."""

    def predict(self, hidden: jax.Array, inputs: Mapping[str, Any]) -> jax.Array:
        """Return the value before each target is drawn, float32 [R, S].

        Args:
            hidden: Hidden states of the trained model, [R, S, D].
            inputs: The entries of the batch that the model reads.
        """
        ...
