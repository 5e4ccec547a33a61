"""Probability ratios of tokens and of sequences."""

from typing import Literal, TypeVar

import jax

from axlearn_core.config import Configurable, node
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens, exp_limited

T_co = TypeVar("T_co", covariant=True)


@node
class RatioConfig(Configurable.Config[T_co]):
    """The base of a ratio.

    Attributes:
        base: Log-probabilities to compare with. `rollout` uses those of the rollouts, and so corrects for every difference from
            the policy that drew the tokens. With `current`, each ratio is 1 and the gradient is that of REINFORCE; an
            `importance-correction` then accounts for the difference.
    """

    base: Literal["rollout", "current"] = "rollout"

    @property
    def constant_terms(self) -> str | None:
        """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
        return "the log-probabilities that the ratios compare with" if self.base == "current" else None


class TokenRatio(Configurable):
    """`p(token) / p_base(token)` for each token (PPO; Schulman et al., 2017, arXiv 1707.06347)."""

    @node
    class Config(RatioConfig["TokenRatio"]):
        """The base."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def ratios(self, tokens: DrawnTokens) -> jax.Array:
        """See `policy_terms.Ratio`."""
        return exp_limited(tokens.log_ratios(self.cfg.base))


class SequenceRatio(Configurable):
    """`(p(sequence) / p_base(sequence)) ** (1 / length)`, for all tokens of a sequence.

    `length` counts the trained tokens of the sequence. This is the ratio of GSPO (Zheng et al., 2025, arXiv 2507.18071).
    """

    @node
    class Config(RatioConfig["SequenceRatio"]):
        """The base, and whether to normalize.

        Attributes:
            normalize: Whether to use the exponent 1 / length. Without it, the ratio is that of the whole sequence.
        """

        normalize: bool = True

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def ratios(self, tokens: DrawnTokens) -> jax.Array:
        """See `policy_terms.Ratio`."""
        total = tokens.sequences.sum(tokens.log_ratios(self.cfg.base))
        return exp_limited(total / tokens.sequences.count() if self.cfg.normalize else total)
