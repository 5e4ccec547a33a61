"""Limits on the ratios of a policy gradient."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import Problem
from axlearn_plugins_rl.policy_gradient.drawn_tokens import DrawnTokens


class PpoClip(Configurable):
    """`min(r * A, clip(r, 1 - low, 1 + high) * A)` (PPO; Schulman et al., 2017, arXiv 1707.06347).

    A `high` above `low` lets unlikely tokens grow faster (DAPO; Yu et al., 2025, arXiv 2503.14476). With `dual`, the objective of a
    token with a negative advantage is at least `dual * A` (Ye et al., 2020, arXiv 1912.09729).
    """

    @node
    class Config(Configurable.Config["PpoClip"]):
        """The limits.

        Attributes:
            low: How far a ratio may fall below 1.
            high: How far a ratio may rise above 1.
            dual: Largest ratio of tokens with negative advantages, or None for no limit.
        """

        low: float = setting(default=0.2, ge=0, le=1)
        high: float = setting(default=0.2, ge=0)
        dual: float | None = setting(default=None, gt=1)

        def validate(self) -> Iterable[Problem]:
            """Check that `dual` is above the range of the clip."""
            yield from super().validate()
            if self.dual is not None and self.dual < 1 + self.high:
                yield Problem(
                    path="dual",
                    message="is inside the range of the clip",
                    got=str(self.dual),
                    expected=f"at least 1 + high = {1 + self.high}",
                )

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def surrogate(self, ratios: jax.Array, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """See `policy_terms.Clip`."""
        advantages, low, high = tokens.advantages, 1 - self.cfg.low, 1 + self.cfg.high
        objective = jnp.minimum(ratios * advantages, jnp.clip(ratios, low, high) * advantages)
        clipped = jnp.where(advantages > 0, ratios > high, (ratios < low) & (advantages < 0))
        if self.cfg.dual is not None:
            objective = jnp.where(advantages < 0, jnp.maximum(objective, self.cfg.dual * advantages), objective)
            clipped |= (advantages < 0) & (ratios > self.cfg.dual)
        return objective, clipped


class CispoClip(Configurable):
    """`stop_gradient(clip(r, floor, cap)) * A * log p` (CISPO; MiniMax, 2025, arXiv 2506.13585).

    A limited ratio only limits the weight of a token. All tokens keep a gradient.
    """

    @node
    class Config(Configurable.Config["CispoClip"]):
        """The limits.

        Attributes:
            cap: Largest weight of a token.
            floor: Smallest weight of a token.
        """

        cap: float = setting(default=5.0, gt=0)
        floor: float = setting(default=0.0, ge=0)

        @property
        def constant_terms(self) -> str | None:
            """See `axlearn_core.contracts.capabilities.HasConstantTerms`."""
            return "the limited ratios"

        def validate(self) -> Iterable[Problem]:
            """Check that the range is not empty."""
            yield from super().validate()
            if self.floor > self.cap:
                yield Problem(path="floor", message="is above cap", got=f"{self.floor} > {self.cap}", fix="lower floor")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def surrogate(self, ratios: jax.Array, tokens: DrawnTokens) -> tuple[jax.Array, jax.Array]:
        """See `policy_terms.Clip`."""
        limited = lax.stop_gradient(jnp.clip(ratios, self.cfg.floor, self.cfg.cap))
        return limited * tokens.advantages * tokens.logprobs, (ratios > self.cfg.cap) | (ratios < self.cfg.floor)
