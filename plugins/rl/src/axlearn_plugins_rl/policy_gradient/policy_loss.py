"""The policy-gradient objective.

Shapes: R rows, S positions per row, D width, V vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.parts import Batch, Model
from axlearn_core.errors import Problem
from axlearn_core.nn import summaries
from axlearn_core.nn.summaries import Summary
from axlearn_plugins_finetune.objectives.reference import bind_reference, build_reference
from axlearn_plugins_finetune.objectives.sequences import (
    check_language_model,
    map_over_positions,
)
from axlearn_plugins_rl.policy_gradient.clips import PpoClip
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens, Sequences, select_model_inputs
from axlearn_plugins_rl.policy_gradient.kl_penalty import estimate
from axlearn_plugins_rl.policy_gradient.loss_means import TokenMean
from axlearn_plugins_rl.policy_gradient.policy_terms import (
    Clip,
    Correction,
    Critic,
    Divergence,
    LossMean,
    Penalty,
    Ratio,
)
from axlearn_plugins_rl.policy_gradient.ratios import RatioConfig, TokenRatio
from axlearn_plugins_transformer.token_logprobs import keep_tokens, scale_logits, token_logprobs


class PolicyGradient(Configurable, nnx.Module):
    """A policy gradient on tokens that the policy drew, composed of replaceable terms.

    The loss of a target is `-correction * clip(ratio, advantage) + penalty - entropy_bonus * entropy`, plus the loss of its value
    if there is a critic. `mean` averages over the targets. Log-probabilities are those of the distribution at the temperature of
    the rollouts.
    """

    @node
    class Config(Configurable.Config["PolicyGradient"]):
        """The terms.

        Attributes:
            ratio: Compares the model with the policy that drew the tokens.
            clip: Limits the ratios, or None.
            penalty: Penalty on the divergence from the reference, or None. Without it, there is no reference.
            correction: Correction for the difference between the rollouts and the trained model, or None. It requires a ratio with
                the base `current`.
            mean: Average over targets.
            entropy_bonus: Weight of the entropy of the policy, which is maximized.
            critic: Estimates advantages from the rewards in place of the advantages of the batch, or None.
            reference: Config of the reference. None uses the model's config.
            reference_weights: Path or URI of the reference's weights. None uses the weights that training starts from.
            loss_chunk: Positions per row whose logits are in memory at a time.
        """

        ratio: Node[Ratio] = TokenRatio.Config()
        clip: Node[Clip] | None = PpoClip.Config()
        penalty: Node[Penalty] | None = None
        correction: Node[Correction] | None = None
        mean: Node[LossMean] = TokenMean.Config()
        entropy_bonus: float = setting(default=0.0, ge=0)
        critic: Node[Critic] | None = None
        reference: Node[Model] | None = None
        reference_weights: str | None = None
        loss_chunk: int = setting(default=128, kind="execution", ge=1)

        def validate(self) -> Iterable[Problem]:
            """Check that no difference is corrected twice, and that a reference is used."""
            yield from super().validate()
            if self.correction is not None and isinstance(self.ratio, RatioConfig) and self.ratio.base == "rollout":
                yield Problem(
                    path="correction",
                    message="corrects for the rollouts a second time, because the base of the ratio is `rollout`",
                    fix="set ratio.base to current, or remove the correction",
                )
            if self.penalty is None and (self.reference is not None or self.reference_weights is not None):
                yield Problem(
                    path="reference_weights" if self.reference is None else "reference",
                    message="is not used without a penalty",
                    fix="set penalty, for example to {type: kl-penalty}",
                )

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        check_language_model(model, "objective")
        self.cfg = cfg
        other = {"config": cfg.reference, "weights": cfg.reference_weights}
        self.reference = build_reference(model, rngs=rngs, **other) if cfg.penalty is not None else None
        if cfg.critic is not None:
            self.critic = cfg.critic.build(model=model, rngs=rngs)

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """See `axlearn_core.contracts.parts.Objective`.

        Args:
            model: A causal language model.
            batch: `tokens`, `targets`, `weights`, `segment_ids` and `positions` of a language model, and float32 [R, S]
                `advantages`, `rollout_logprobs` (of the distribution that was sampled from) and `rewards` (of a trajectory, at its
                last drawn target), each aligned with the targets. `temperature`, float32 [R], is that of the rollouts. With
                `kept_tokens`, int32 [R, S, W], log-probabilities are those of the distribution over these tokens; see
                `token_logprobs.keep_tokens`. Values at targets with weight 0 are not used.
            key: Unused, because the model has its own random streams.

        Returns:
            (loss, summaries). `weight` is the divisor of the mean. The other summaries are averages over the trained targets:
            `ratio`, `clip_fraction`, `entropy`, `policy_loss`, `kl` if there is a penalty, `rollout_kl` (k3 estimate of the
            divergence of the rollouts from the trained model), `correction`, and those of the critic. `ratio_max` and
            `train_rollout_difference` (of log-probabilities) are maxima. Summaries of the layers of a critic have the prefix
            `critic_`.
        """
        batch = {name: x for name, x in batch.items() if x is not None}
        with summaries.collect() as collected:
            hidden, _ = model.hidden_states(select_model_inputs(batch, layers=True))
        logprobs, entropies = self._log_probabilities(model, hidden, batch, with_gradient=self.cfg.entropy_bonus > 0)
        reference_logprobs = None
        if self.cfg.penalty is not None:
            reference = bind_reference(self.reference, model)
            other_hidden, _ = reference.hidden_states(select_model_inputs(batch))
            other, _ = self._log_probabilities(reference, other_hidden, batch, with_gradient=False)
            reference_logprobs = lax.stop_gradient(other)
        with summaries.collect() as critic:
            loss, report = self.combine(batch, hidden, logprobs, entropies, reference_logprobs)
        of_critic = {f"critic_{name}": value for name, value in {**critic.summaries, **critic.losses}.items()}
        losses = [*collected.losses.values(), *critic.losses.values()]
        return loss + sum(losses), {**report, **collected.summaries, **collected.losses, **of_critic}

    def combine(
        self,
        batch: Batch,
        hidden: jax.Array,
        logprobs: jax.Array,
        entropies: jax.Array,
        reference_logprobs: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Compute the loss and its summaries from log-probabilities.

        Args:
            batch: See `loss`.
            hidden: Hidden states, [R, S, D]. Only a critic uses them.
            logprobs: Log-probabilities of the targets, float32 [R, S].
            entropies: Entropies of the distributions of the targets, float32 [R, S].
            reference_logprobs: Log-probabilities of the targets under the reference, float32 [R, S]. None without a penalty.
        """
        cfg, tokens = self.cfg, select_drawn(batch, logprobs)
        ratios = cfg.ratio.build().ratios(tokens)
        divergence = None
        if cfg.penalty is not None and reference_logprobs is not None:
            masked = jnp.where(tokens.mask > 0, reference_logprobs, 0.0)
            divergence = cfg.penalty.build().compute(tokens, masked, ratios)
        tokens, loss, report = self._set_advantages(hidden, batch, tokens, divergence)
        objective, clipped = ratios * tokens.advantages, jnp.zeros(ratios.shape, bool)
        if cfg.clip is not None:
            objective, clipped = cfg.clip.build().surrogate(ratios, tokens)
        if cfg.correction is not None:
            factors = cfg.correction.build().factors(tokens)
            objective, report = objective * factors, {**report, "correction": factors}
        report |= {"policy_loss": -objective, "ratio": ratios, "clip_fraction": clipped, "entropy": entropies}
        loss = loss - objective - cfg.entropy_bonus * entropies
        if divergence is not None:
            loss, report = loss + divergence.loss, {**report, "kl": divergence.estimates}
        shares, weight = cfg.mean.build().spread(tokens)
        mean = jnp.sum(shares * jnp.where(tokens.mask > 0, loss, 0.0)) / jnp.where(weight > 0, weight, 1.0)
        return mean, {
            "weight": weight,
            **{name: _average(values, tokens.mask) for name, values in report.items()},
            **_compare_rollouts(tokens, ratios),
        }

    def _log_probabilities(
        self, model: Any, hidden: jax.Array, batch: Batch, *, with_gradient: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return the log-probabilities of the targets and the entropies of their distributions, float32 [R, S].

        Args:
            model: A causal language model.
            hidden: Output of its decoder, [R, S, D].
            batch: The batch, with `targets` and `temperature`.
            with_gradient: Whether the entropies have gradients.
        """
        temperature = jnp.where(batch["temperature"] > 0, batch["temperature"], 1.0)[:, None]  # 0 in empty rows

        kept_tokens = batch.get("kept_tokens")

        def chunk_values(part: Any) -> tuple[jax.Array, jax.Array]:
            hidden, targets, *limits = part
            logits = scale_logits(model.logits(hidden).astype(jnp.float32), temperature)
            log_distribution = jax.nn.log_softmax(logits if with_gradient else lax.stop_gradient(logits))
            entropies = -jnp.sum(jnp.exp(log_distribution) * log_distribution, axis=-1)
            limited = keep_tokens(logits, limits[0], targets) if limits else logits
            return token_logprobs(limited, targets)[0], entropies

        arrays = (hidden, batch["targets"], *(() if kept_tokens is None else (kept_tokens,)))
        return map_over_positions(chunk_values, arrays, self.cfg.loss_chunk)

    def _set_advantages(
        self, hidden: jax.Array, batch: Batch, tokens: DrawnTokens, divergence: Divergence | None
    ) -> tuple[DrawnTokens, jax.Array, dict[str, jax.Array]]:
        """Return the tokens with their final advantages, the loss of the values or 0, and arrays to summarize."""
        penalty = jnp.zeros_like(tokens.advantages) if divergence is None else divergence.reward
        if self.cfg.critic is None:
            advantages = tokens.advantages + tokens.mask * tokens.sequences.sum_from_here(penalty)
            return dataclasses.replace(tokens, advantages=advantages), jnp.zeros_like(penalty), {}
        result = self.critic.assess(hidden, batch, batch["rewards"] + penalty, tokens)
        return dataclasses.replace(tokens, advantages=result.advantages), result.loss, dict(result.summaries)


def select_drawn(batch: Batch, logprobs: jax.Array) -> DrawnTokens:
    """Return the trained targets of a batch. Values at other targets become 0.

    Args:
        batch: See `PolicyGradient.loss`.
        logprobs: Log-probabilities of all targets, float32 [R, S].
    """
    sequences = Sequences.from_batch(batch)
    real = sequences.mask > 0
    return DrawnTokens(
        logprobs=jnp.where(real, logprobs, 0.0),
        rollout_logprobs=jnp.where(real, batch["rollout_logprobs"], 0.0),
        advantages=jnp.where(real, batch["advantages"], 0.0),
        weights=batch["weights"],
        sequences=sequences,
    )


def _average(values: jax.Array, mask: jax.Array) -> Summary:
    """Average over the trained targets."""
    count = jnp.sum(mask)
    total = jnp.sum(jnp.where(mask > 0, lax.stop_gradient(values), 0.0))
    return Summary(total / jnp.where(count > 0, count, 1.0), count, "mean", "tokens")


def _compare_rollouts(tokens: DrawnTokens, ratios: jax.Array) -> dict[str, Summary]:
    """Summarize the difference between the trained model and the rollouts."""
    differences, count = jnp.abs(lax.stop_gradient(tokens.log_ratios("rollout"))), jnp.sum(tokens.mask)
    largest = jnp.max(jnp.where(tokens.mask > 0, lax.stop_gradient(ratios), 0.0))
    return {
        "rollout_kl": _average(estimate("k3", tokens.rollout_logprobs, tokens.logprobs), tokens.mask),
        "ratio_max": Summary(largest, count, "max", "tokens"),
        "train_rollout_difference": Summary(jnp.max(differences), count, "max", "tokens"),
    }
