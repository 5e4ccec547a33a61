"""Odds ratio preference optimization (Hong et al., 2024, arXiv 2403.07691)."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_plugins_finetune.objectives.preference_objective import (
    PreferenceObjective,
    Report,
    count_tokens,
    report_rewards,
)

LARGEST = -1e-6
"""Largest mean log-probability in the odds, which are infinite at 0."""


class ORPO(PreferenceObjective):
    """Mean negative log-likelihood of the chosen answer's tokens, minus `odds_weight * log sigmoid(log odds ratio)` (equation 6).

    The odds of an answer are `p / (1 - p)`, and `log p` is the mean log-probability of its tokens. There is no reference, so the
    objective can replace supervised fine-tuning.
    """

    @node
    class Config(PreferenceObjective.Config["ORPO"]):
        """The loss.

        Attributes:
            odds_weight: Weight of the odds ratio: lambda in the paper.
        """

        odds_weight: float = setting(default=0.1, gt=0)

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses, and the rewards: `odds_weight` times the mean log-probabilities. See `PreferenceObjective.compare`."""
        means = scores / count_tokens(batch)
        log_odds = means - jnp.log(-jnp.expm1(jnp.minimum(means, LARGEST)))
        ratio = log_odds[:, 0] - log_odds[:, 1]
        report = {**report_rewards(self.cfg.odds_weight * means), "log_odds_ratio": ratio, "nll": -means[:, 0]}
        return -means[:, 0] - self.cfg.odds_weight * jax.nn.log_sigmoid(ratio), report
