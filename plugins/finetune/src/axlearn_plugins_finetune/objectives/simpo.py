"""Simple preference optimization (Meng et al., 2024, arXiv 2405.14734)."""

from typing import Any

import jax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_plugins_finetune.objectives.preference_objective import (
    PreferenceObjective,
    Report,
    count_tokens,
    report_rewards,
    smooth_logistic,
)


class SimPO(PreferenceObjective):
    """`-log sigmoid(reward of the chosen answer - reward of the rejected answer - gamma)`, averaged over pairs (equation 6).

    The reward of an answer is beta times the mean log-probability of its tokens. There is no reference.
    """

    @node
    class Config(PreferenceObjective.Config["SimPO"]):
        """The loss.

        Attributes:
            beta: Scale of the rewards.
            gamma: Margin by which the reward of the chosen answer should exceed the other one.
            label_smoothing: Assumed fraction of pairs with swapped labels.
        """

        beta: float = setting(default=2.0, gt=0)
        gamma: float = setting(default=1.0, ge=0)
        label_smoothing: float = setting(default=0.0, ge=0, lt=0.5)

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses and the rewards. See `PreferenceObjective.compare`."""
        rewards = self.cfg.beta * scores / count_tokens(batch)
        margin = rewards[:, 0] - rewards[:, 1] - self.cfg.gamma
        return smooth_logistic(margin, self.cfg.label_smoothing), report_rewards(rewards)
