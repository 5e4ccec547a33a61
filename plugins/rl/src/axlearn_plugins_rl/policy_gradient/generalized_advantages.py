"""Generalized advantage estimation (GAE; Schulman et al., 2016, arXiv 1506.02438), and the loss of the values."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import RequestError
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens
from axlearn_plugins_rl.policy_gradient.policy_terms import Criticism, ValueModel
from axlearn_plugins_rl.policy_gradient.value_head import ValueHead


class GeneralizedAdvantages(Configurable, nnx.Module):
    """`A[t] = sum over k of (gamma * decay)^k * (r[t + k] + gamma * V[t + k + 1] - V[t + k])`.

    The sum is over the drawn tokens of a sequence. The values V are those of the batch's `rollout_values`, float32 [R, S], or else
    those of the present weights. The value after the last token is 0. The loss of a value is half the squared distance from the
    return `A[t] + V[t]`.
    """

    @node
    class Config(Configurable.Config["GeneralizedAdvantages"]):
        """The estimator.

        Attributes:
            values: Predicts the values.
            gamma: Discount per drawn token.
            decay: Decay λ of later errors. 1 uses the observed return, and 0 uses only the next value.
            coefficient: Weight of the loss of the values.
            clip: How far a value may move from `rollout_values` before its loss stops falling (PPO2), or None for no limit.
            normalize: Whether to give the advantages of a batch a mean of 0 and a standard deviation of 1.
        """

        values: Node[ValueModel] = ValueHead.Config()
        gamma: float = setting(default=1.0, ge=0, le=1)
        decay: float = setting(default=0.95, ge=0, le=1)
        coefficient: float = setting(default=0.1, gt=0)
        clip: float | None = setting(default=None, gt=0)
        normalize: bool = False

        @property
        def constant_terms(self) -> str | None:
            """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
            return "the advantages and the returns"

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        self.cfg = cfg
        self.values = cfg.values.build(model=model, rngs=rngs)
        self.batch_dependence = "normalizes advantages over the batch" if cfg.normalize else None

    def assess(self, hidden: jax.Array, batch: Batch, rewards: jax.Array, tokens: DrawnTokens) -> Criticism:
        """See `policy_terms.Critic`."""
        cfg, sequences = self.cfg, tokens.sequences
        values = self.values.predict(hidden, batch)
        base = batch.get("rollout_values")
        if base is None:
            if cfg.clip is not None:
                raise RequestError(
                    "objective.critic.clip needs the values from the time of the rollouts\n"
                    f"    got: a batch of {', '.join(sorted(batch))}\n    expected: rollout_values\n"
                    "    fix: set objective.critic.clip to null"
                )
            base = lax.stop_gradient(values)
        errors = rewards + cfg.gamma * sequences.next_value(base) - base
        advantages = tokens.mask * sequences.sum_from_here(errors, cfg.gamma * cfg.decay)
        returns = advantages + base
        loss = (values - returns) ** 2
        if cfg.clip is not None:
            limited = base + jnp.clip(values - base, -cfg.clip, cfg.clip)
            loss = jnp.maximum(loss, (limited - returns) ** 2)
        if cfg.normalize:
            advantages = _normalize(advantages, tokens.mask)
        return Criticism(
            advantages=lax.stop_gradient(advantages),
            loss=0.5 * cfg.coefficient * loss,
            summaries={"value": values, "return": returns, "value_loss": 0.5 * loss},
        )


def _normalize(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Standardize the values at which the mask is 1."""
    count = jnp.maximum(jnp.sum(mask), 1.0)
    centered = values - jnp.sum(values * mask) / count
    variance = jnp.sum(centered**2 * mask) / count
    return mask * centered * lax.rsqrt(variance + 1e-8)
