"""The penalty on the divergence from a reference.

With x = log p_reference - log p, the estimators are k1 = -x, k2 = x² / 2 and k3 = exp(x) - 1 - x (Schulman, 2020, "Approximating KL
divergence").
"""

from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import Problem
from axlearn_plugins_rl.policy_gradient.drawn_tokens import MAX_LOG_RATIO, DrawnTokens
from axlearn_plugins_rl.policy_gradient.policy_terms import Divergence

Estimator = Literal["k1", "k2", "k3"]


class KlPenalty(Configurable):
    """`coefficient * KL(policy || reference)`, estimated from the drawn tokens.

    In the loss, the penalty of a token is added to its loss (GRPO; Shao et al., 2024, arXiv 2402.03300). In the reward, it is
    subtracted from the reward of the token (Ouyang et al., 2022, arXiv 2203.02155). It then lowers the advantages of the token and
    of the tokens before it in its sequence.
    """

    @node
    class Config(Configurable.Config["KlPenalty"]):
        """The penalty.

        Attributes:
            coefficient: Weight of the penalty. With 0, the divergence is only logged.
            estimator: Estimator of the divergence.
            placement: `loss`, or `reward`.
            importance: Multiply a penalty in the loss by the probability ratio, so that its gradient is unbiased (DeepSeek-AI,
                2025, arXiv 2512.02556).
        """

        coefficient: float = setting(default=0.04, ge=0)
        estimator: Estimator = "k3"
        placement: Literal["loss", "reward"] = "loss"
        importance: bool = False

        def validate(self) -> Iterable[Problem]:
            """Check that the penalty has an effect."""
            yield from super().validate()
            if self.placement == "reward" and self.importance:
                yield Problem(
                    path="importance", message="applies only to a penalty in the loss", fix="set importance to false"
                )
            if self.placement == "loss" and self.estimator == "k1" and not self.importance:
                yield Problem(
                    path="estimator",
                    message="k1 in the loss has no effect, because the expectation of its gradient is zero",
                    fix="use k2 or k3, set importance to true, or set placement to reward",
                )

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def compute(self, tokens: DrawnTokens, reference_logprobs: jax.Array, ratios: jax.Array) -> Divergence:
        """See `policy_terms.Penalty`."""
        cfg, zeros = self.cfg, jnp.zeros_like(reference_logprobs)
        if cfg.placement == "reward":
            estimates = estimate(cfg.estimator, tokens.rollout_logprobs, reference_logprobs)
            return Divergence(estimates=estimates, loss=zeros, reward=-cfg.coefficient * estimates)
        estimates = estimate(cfg.estimator, tokens.logprobs, reference_logprobs)
        loss = cfg.coefficient * (estimates * ratios if cfg.importance else estimates)
        return Divergence(estimates=estimates, loss=loss, reward=zeros)


def estimate(estimator: Estimator, logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """Return an estimate of the divergence for each token, in nats."""
    x = reference_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x**2 / 2
    limited = jnp.minimum(x, MAX_LOG_RATIO)
    return jnp.expm1(limited) - limited
