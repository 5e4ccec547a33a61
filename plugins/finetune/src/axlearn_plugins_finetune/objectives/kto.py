"""Kahneman-Tversky optimization (Ethayarajh et al., 2024, arXiv 2402.01306)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_core.nn.summaries import Summary
from axlearn_plugins_finetune.objectives.preference_objective import (
    ReferenceObjective,
    Report,
    mean_of_rows,
    real_rows,
    stack_answers,
)
from axlearn_plugins_finetune.objectives.reference import bind_reference, copy_for_evaluation


class KTO(ReferenceObjective):
    """`weight * (1 - sigmoid(beta * (log-ratio - KL)))` of a desirable answer, and `KL - log-ratio` of any other.

    KL estimates the divergence of the model from the reference: the mean log-ratio of answers to the prompts of other rows, at
    least 0. It has no gradient. See `ReferenceObjective` for the log-ratios.
    """

    @node
    class Config(ReferenceObjective.Config["KTO"]):
        """The loss.

        Attributes:
            beta: How strongly the model is pulled toward the reference.
            desirable_weight: Weight of the loss of desirable answers.
            undesirable_weight: Weight of the loss of other answers. Choose the weights so that their ratio times the ratio of the
                numbers of answers is between 1 and 4/3.
        """

        beta: float = setting(default=0.1, gt=0)
        desirable_weight: float = setting(default=1.0, gt=0)
        undesirable_weight: float = setting(default=1.0, gt=0)

        @property
        def constant_terms(self) -> str | None:
            """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
            return "the estimates of the KL divergence"

    answers = ("completion",)
    batch_dependence = "estimates a KL divergence from the answers of the batch"

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses, and the rewards: beta times the log-ratios. See `PreferenceObjective.compare`."""
        cfg = self.cfg
        ratios = self.log_ratios(scores, model, batch)[:, 0]
        divergence = self._divergence(model, batch)
        is_desirable = batch["labels"] > 0
        gain = jnp.where(is_desirable, ratios - divergence, divergence - ratios)
        weights = jnp.where(is_desirable, cfg.desirable_weight, cfg.undesirable_weight)
        counted = real_rows(batch, "completion")
        report = {"kl": Summary(divergence, jnp.sum(counted), "mean", "rows")}
        for name, mask in (("reward_desirable", is_desirable), ("reward_undesirable", ~is_desirable)):
            members = counted * mask
            report[name] = Summary(mean_of_rows(cfg.beta * ratios, members), jnp.sum(members), "mean", "rows")
        return weights * jax.nn.sigmoid(-cfg.beta * gain), report

    def _divergence(self, model: Any, batch: Batch) -> jax.Array:
        rows = stack_answers(batch, ("mismatched",))
        scores = (self.score(m, rows) for m in (copy_for_evaluation(model), bind_reference(self.reference, model)))
        policy, reference = (lax.stop_gradient(x) for x in scores)
        return jnp.maximum(mean_of_rows(policy - reference, real_rows(batch, "mismatched")), 0.0)
