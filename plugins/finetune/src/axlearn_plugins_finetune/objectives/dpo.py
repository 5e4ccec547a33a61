"""Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290).

Shapes: B pairs, S positions per row.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose import FrozenModel
from axlearn_core.config import Configurable, Node, find, node, setting
from axlearn_core.contracts.parts import Batch, Model
from axlearn_core.nn import summaries
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear, is_adapted
from axlearn_plugins_finetune.objectives.preference_input import ANSWERS
from axlearn_plugins_finetune.objectives.sequences import check_language_model, log_probabilities


class DPO(Configurable, nnx.Module):
    """`-log sigmoid(beta * (log-ratio of the chosen answer - log-ratio of the rejected answer))`, averaged over pairs.

    A log-ratio is the log-probability of an answer under the model minus its log-probability under a frozen reference. By
    default, the reference uses the weights that training starts from. If the model has LoRA adapters and no reference is named,
    the reference is the model without its adapters, which needs no extra memory.
    """

    @node
    class Config(Configurable.Config["DPO"]):
        """The loss and its reference.

        Attributes:
            beta: How strongly the model is pulled toward the reference.
            label_smoothing: Assumed fraction of pairs with swapped labels (Mitchell, 2023).
            reference: Config of the reference. None uses the model's config.
            reference_weights: Path or URI of the reference's weights. None uses the weights that training starts from.
            loss_chunk: Positions per row whose logits are in memory at a time.
        """

        beta: float = setting(default=0.1, gt=0)
        label_smoothing: float = setting(default=0.0, ge=0, lt=0.5)
        reference: Node[Model] | None = None
        reference_weights: str | None = None
        loss_chunk: int = setting(default=128, kind="execution", ge=1)

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        check_language_model(model, "objective")
        self.cfg = cfg
        is_separate = cfg.reference is not None or cfg.reference_weights is not None or not find(model, LoraLinear)
        config = cfg.reference or model
        check_language_model(config, "objective.reference")
        self.reference = FrozenModel(config, rngs=rngs, weights=cfg.reference_weights) if is_separate else None

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """See `axlearn_core.contracts.parts.Objective`.

        Args:
            model: A causal language model.
            batch: Batch of a `preference-input`.
            key: Unused, because the model has its own random streams.

        Returns:
            (loss, summaries), averaged over pairs. `reward_chosen` and `reward_rejected` are beta times the log-ratios,
            `reward_margin` is their difference, and `reward_accuracy` is the fraction of pairs with a positive margin. `weight` is
            the number of pairs.
        """
        rows = {name: _pairs_as_rows(batch, name) for name in ("tokens", "targets", "weights")}
        with summaries.collect() as collected:
            policy = self._scores(model, rows)
        reference = self.reference.bind() if self.reference is not None else without_adapters(model)
        rewards = self.cfg.beta * (policy - lax.stop_gradient(self._scores(reference, rows)))
        preferred, rejected = rewards[:, 0], rewards[:, 1]
        margin, smoothing = preferred - rejected, 0.0 if summaries.is_held_out() else self.cfg.label_smoothing
        losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
        counted = (jnp.sum(batch["chosen_weights"], axis=1) > 0).astype(jnp.float32)
        weight = jnp.sum(counted)

        def mean(values: jax.Array) -> jax.Array:
            return jnp.sum(values * counted) / jnp.where(weight > 0, weight, 1.0)

        report = {
            "weight": weight,
            "reward_chosen": mean(preferred),
            "reward_rejected": mean(rejected),
            "reward_margin": mean(margin),
            "reward_accuracy": mean((margin > 0).astype(jnp.float32)),
            **collected.summaries,
            **collected.losses,
        }
        return mean(losses) + sum(collected.losses.values()), report

    def evaluation_loss(self, model: Any, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the loss on held-out pairs, in nats per pair, without label smoothing or auxiliary losses."""
        with summaries.held_out():
            return DPO.loss(self, model, batch, None)

    def _scores(self, model: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
        """Return the log-probabilities of the chosen and rejected answers, float32 [B, 2]."""
        hidden, _ = model.hidden_states(rows)
        scores = log_probabilities(model, hidden, rows["targets"], rows["weights"], self.cfg.loss_chunk)
        return scores.reshape(-1, len(ANSWERS))


def without_adapters(model: Any) -> Any:
    """Return the bound model in evaluation mode, with its LoRA adapters disabled."""
    base = nnx.merge(*nnx.split(model))
    base.eval()
    for _, module in nnx.iter_modules(base):
        if is_adapted(module):
            module.lora_scale = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    return base


def _pairs_as_rows(batch: Batch, name: str) -> jax.Array:
    """Stack pairs as rows [2 * B, S]. The rows of a pair are adjacent, so they stay on the same device."""
    pairs = jnp.stack([batch[f"{answer}_{name}"] for answer in ANSWERS], axis=1)
    return pairs.reshape(-1, pairs.shape[-1])
