"""The common part of objectives that learn from preferences.

Shapes: B rows of the batch, A answers per row, S positions per answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.parts import Batch, Model
from axlearn_core.nn import summaries
from axlearn_plugins_finetune.objectives.preference_input import ANSWERS
from axlearn_plugins_finetune.objectives.reference import bind_reference, build_reference
from axlearn_plugins_finetune.objectives.sequences import check_language_model, log_probabilities

T_co = TypeVar("T_co", covariant=True)
Report = dict[str, Any]


class PreferenceObjective(Configurable, nnx.Module):
    """A loss of the answers of each row of the batch. A subclass implements `compare`, and may replace `score`.

    Rows without an answer, which pad the last batch of an evaluation, do not count.
    """

    @node
    class Config(Configurable.Config[T_co]):
        """Memory of the loss.

        Attributes:
            loss_chunk: Positions per row whose logits are in memory at a time.
        """

        loss_chunk: int = setting(default=128, kind="execution", ge=1)

    answers: ClassVar[tuple[str, ...]] = ANSWERS
    """Prefixes of the batch's arrays, one for each answer that is scored."""

    def __init__(self, cfg: Config[Any], *, model: Node[Any]):
        check_language_model(model, "objective")
        self.cfg: Any = cfg

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """See `axlearn_core.contracts.parts.Objective`.

        Args:
            model: A causal language model.
            batch: Batch of the input that belongs to the objective.
            key: Unused, because the model has its own random streams.

        Returns:
            (loss, summaries), averaged over rows. `weight` is the number of rows. See `compare` for the other summaries.
        """
        rows = stack_answers(batch, self.answers)
        with summaries.collect() as collected:
            scores = self.score(model, rows).reshape(-1, len(self.answers))
        losses, report = self.compare(scores, model, batch)
        counted = real_rows(batch, self.answers[0])
        means = {k: x if summaries.is_summary(x) else mean_of_rows(x, counted) for k, x in report.items()}
        report = {"weight": jnp.sum(counted), **means, **collected.summaries, **collected.losses}
        return mean_of_rows(losses, counted) + sum(collected.losses.values()), report

    def evaluation_loss(self, model: Any, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the loss of held-out rows, without label smoothing or auxiliary losses."""
        with summaries.held_out():
            return PreferenceObjective.loss(self, model, batch, None)

    def score(self, model: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
        """Return a score of each answer: by default its log-probability, in nats.

        Args:
            model: The bound model.
            rows: Arrays [B * A, S]; see `stack_answers`.

        Returns:
            Float32 [B * A].
        """
        hidden, _ = model.hidden_states(rows)
        return log_probabilities(model, hidden, rows["targets"], rows["weights"], self.cfg.loss_chunk)

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the loss of each row, and what to report.

        Args:
            scores: Scores of the answers, float32 [B, A].
            model: The bound model.
            batch: The batch.

        Returns:
            Float32 [B], and float32 [B] by name, to average over rows. A value may also be a `Summary`.
        """
        raise NotImplementedError


class ReferenceObjective(PreferenceObjective):
    """A preference objective that compares the model with a frozen reference.

    A log-ratio is the log-probability of an answer under the model minus its log-probability under the reference. By default, the
    reference uses the weights that training starts from. If the model has LoRA adapters and no reference is named, the reference
    is the model without its adapters, which needs no extra memory.
    """

    @node
    class Config(PreferenceObjective.Config[T_co]):
        """The reference.

        Attributes:
            reference: Config of the reference. None uses the model's config.
            reference_weights: Path or URI of the reference's weights. None uses the weights that training starts from.
        """

        reference: Node[Model] | None = None
        reference_weights: str | None = None

    def __init__(self, cfg: Config[Any], *, model: Node[Any], rngs: nnx.Rngs):
        super().__init__(cfg, model=model)
        self.reference = build_reference(model, rngs=rngs, config=cfg.reference, weights=cfg.reference_weights)

    def log_ratios(self, scores: jax.Array, model: Any, batch: Batch) -> jax.Array:
        """Subtract the scores of the reference, float32 [B, A], from the model's."""
        reference = bind_reference(self.reference, model)
        return scores - lax.stop_gradient(self.score(reference, stack_answers(batch, self.answers))).reshape(
            scores.shape
        )


def stack_answers(batch: Batch, answers: Sequence[str]) -> dict[str, jax.Array]:
    """Stack the answers of each row as `tokens`, `targets` and `weights`, [B * A, S].

    The answers of a row are adjacent, so that they stay on the same device.
    """

    def stack(name: str) -> jax.Array:
        arrays = jnp.stack([batch[f"{answer}_{name}"] for answer in answers], axis=1)
        return arrays.reshape(-1, arrays.shape[-1])

    return {name: stack(name) for name in ("tokens", "targets", "weights")}


def count_tokens(batch: Batch, answers: Sequence[str] = ANSWERS) -> jax.Array:
    """Return the number of tokens of each answer, float32 [B, A]. Padding has 1, so that it can be a divisor."""
    return jnp.stack([jnp.maximum(jnp.sum(batch[f"{answer}_weights"], axis=1), 1.0) for answer in answers], axis=1)


def real_rows(batch: Batch, answer: str) -> jax.Array:
    """Return 1 for each row of the batch that has this answer, and 0 for padding, float32 [B]."""
    return (jnp.sum(batch[f"{answer}_weights"], axis=1) > 0).astype(jnp.float32)


def mean_of_rows(values: jax.Array, counted: jax.Array) -> jax.Array:
    """Average float32 [B] over the rows that `counted` marks with 1. The mean of no rows is 0."""
    weight = jnp.sum(counted)
    return jnp.sum(values * counted) / jnp.where(weight > 0, weight, 1.0)


def report_rewards(rewards: jax.Array) -> Report:
    """Report the rewards of pairs, float32 [B, 2], with their margin and accuracy."""
    margin = rewards[:, 0] - rewards[:, 1]
    return {
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).astype(jnp.float32),
    }


def smooth_logistic(margin: jax.Array, smoothing: float) -> jax.Array:
    """Return the logistic loss of a margin if a fraction of the labels is wrong: `-(1 - s) log sigmoid(m) - s log sigmoid(-m)`.

    Evaluation does not smooth.
    """
    smoothing = 0.0 if summaries.is_held_out() else smoothing
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
