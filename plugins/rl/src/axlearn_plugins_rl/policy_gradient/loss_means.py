"""Means over the targets of a batch."""

import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens


class TokenMean(Configurable):
    """The mean over the tokens of the batch, so that long sequences count more (DAPO; Yu et al., 2025, arXiv 2503.14476)."""

    @node
    class Config(Configurable.Config["TokenMean"]):
        """It has no settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spread(self, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """See `policy_terms.LossMean`."""
        return tokens.weights, jnp.sum(tokens.weights)


class SequenceMean(Configurable):
    """The mean over the tokens of each sequence, then over sequences (GRPO; Shao et al., 2024, arXiv 2402.03300)."""

    @node
    class Config(Configurable.Config["SequenceMean"]):
        """It has no settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spread(self, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """See `policy_terms.LossMean`."""
        return tokens.weights / tokens.sequences.count(), tokens.sequences.number()


class FixedLengthMean(Configurable):
    """The sum over the tokens of each sequence divided by a fixed length, then the mean over sequences.

    Long answers are then not favored when they are wrong (Dr. GRPO; Liu et al., 2025, arXiv 2503.20783).
    """

    @node
    class Config(Configurable.Config["FixedLengthMean"]):
        """The length.

        Attributes:
            length: Length in tokens, such as the maximum length of an answer. None uses the number of positions in a row.
        """

        length: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spread(self, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """See `policy_terms.LossMean`."""
        return tokens.weights / (self.cfg.length or tokens.weights.shape[1]), tokens.sequences.number()
