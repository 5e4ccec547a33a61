"""Identity preference optimization (Azar et al., 2023, arXiv 2310.12036)."""

from typing import Any

import jax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_plugins_finetune.objectives.preference_objective import (
    ReferenceObjective,
    Report,
    count_tokens,
    report_rewards,
)


class IPO(ReferenceObjective):
    """`(log-ratio of the chosen answer - log-ratio of the rejected answer - 1 / (2 beta))^2`, averaged over pairs (equation 17).

    The margin of the log-ratios has a target, so the model does not leave the reference further if all labels agree. See
    `ReferenceObjective` for the log-ratios.
    """

    @node
    class Config(ReferenceObjective.Config["IPO"]):
        """The loss.

        Attributes:
            beta: How strongly the model is pulled toward the reference: tau in the paper.
            per_token: Whether to divide the log-ratio of an answer by its number of tokens. The target of the margin then does not
                depend on the length of the answers.
        """

        beta: float = setting(default=0.1, gt=0)
        per_token: bool = True

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses, and the rewards: beta times the log-ratios. See `PreferenceObjective.compare`."""
        ratios = self.log_ratios(scores, model, batch)
        if self.cfg.per_token:
            ratios = ratios / count_tokens(batch)
        losses = (ratios[:, 0] - ratios[:, 1] - 1 / (2 * self.cfg.beta)) ** 2
        return losses, report_rewards(self.cfg.beta * ratios)
