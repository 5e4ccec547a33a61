"""Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290)."""

from typing import Any

import jax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_plugins_finetune.objectives.preference_objective import (
    ReferenceObjective,
    Report,
    report_rewards,
    smooth_logistic,
)


class DPO(ReferenceObjective):
    """`-log sigmoid(beta * (log-ratio of the chosen answer - log-ratio of the rejected answer))`, averaged over pairs.

    See `ReferenceObjective` for the log-ratios.
    """

    @node
    class Config(ReferenceObjective.Config["DPO"]):
        """The loss.

        Attributes:
            beta: How strongly the model is pulled toward the reference.
            label_smoothing: Assumed fraction of pairs with swapped labels (Mitchell, 2023).
        """

        beta: float = setting(default=0.1, gt=0)
        label_smoothing: float = setting(default=0.0, ge=0, lt=0.5)

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses, and the rewards: beta times the log-ratios. See `PreferenceObjective.compare`."""
        rewards = self.cfg.beta * self.log_ratios(scores, model, batch)
        return smooth_logistic(rewards[:, 0] - rewards[:, 1], self.cfg.label_smoothing), report_rewards(rewards)
