"""Importance sampling between the policy that drew the tokens and the trained model."""

from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import Problem
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens, exp_limited


class ImportanceCorrection(Configurable):
    """Weights each token by `w = p(token) / p_rollout(token)`, without gradients.

    They correct for rollouts by older parameters, and by an engine with other kernels or dtypes. They are truncated or masked (Yao
    et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """

    @node
    class Config(Configurable.Config["ImportanceCorrection"]):
        """The correction.

        Attributes:
            level: `token`, or `sequence` for the product over the trained tokens of a sequence.
            mode: `truncate` limits weights to the range. `mask` drops tokens or sequences with weights outside the range.
            low: Smallest weight.
            high: Largest weight.
        """

        level: Literal["token", "sequence"] = "token"
        mode: Literal["truncate", "mask"] = "truncate"
        low: float = setting(default=0.0, ge=0)
        high: float = setting(default=2.0, gt=0)

        @property
        def constant_terms(self) -> str | None:
            """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
            return "the corrections"

        def validate(self) -> Iterable[Problem]:
            """Check that the range is not empty."""
            yield from super().validate()
            if self.low > self.high:
                yield Problem(path="low", message="is above high", got=f"{self.low} > {self.high}", fix="lower low")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def factors(self, tokens: DrawnTokens) -> jax.Array:
        """See `policy_terms.Correction`."""
        log_ratios = lax.stop_gradient(tokens.log_ratios("rollout"))
        if self.cfg.level == "sequence":
            log_ratios = tokens.sequences.sum(log_ratios)
        factors = exp_limited(log_ratios)
        if self.cfg.mode == "truncate":
            return jnp.clip(factors, self.cfg.low, self.cfg.high)
        return jnp.where((factors >= self.cfg.low) & (factors <= self.cfg.high), factors, 0.0)
