"""The rewards `length` and `environment`, which read the figures of the rollout."""

from collections.abc import Iterable, Sequence

from axlearn_core.config import REQUIRED, Configurable, node, setting
from axlearn_core.errors import Problem
from axlearn_plugins_rl.rewards.judged_reward import failed_score
from axlearn_plugins_rl.rollout_contracts import Rollout, Score

ENVIRONMENT_REWARD = "environment_reward"
"""Metric of a rollout: the sum of the rewards that its environment returned."""


class LengthReward(Configurable):
    """A penalty on long answers: 0 up to `limit - margin` tokens, then linearly down to -1 at `limit` tokens.

    This is the soft overlong punishment of DAPO (equation 13 of Yu et al., 2025, arXiv:2503.14476). Tokens of the prompt and of
    environments do not count.
    """

    @node
    class Config(Configurable.Config["LengthReward"]):
        """The lengths.

        Attributes:
            limit: Number of tokens from which the reward is -1.
            margin: Number of tokens before the limit at which the penalty begins.
        """

        limit: int = setting(default=REQUIRED, ge=1)
        margin: int = setting(default=REQUIRED, ge=1)

        def validate(self) -> Iterable[Problem]:
            """Check that the margin does not exceed the limit."""
            if self.margin > self.limit:
                yield Problem(
                    path="margin", message="exceeds the limit", got=str(self.margin), expected=f"at most {self.limit}"
                )

    def __init__(self, cfg: Config):
        self.config = cfg

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return a score from -1 to 0 for each rollout."""
        return [failed_score(rollout) or self._score(rollout.num_drawn) for rollout in rollouts]

    def _score(self, length: int) -> Score:
        excess = length - (self.config.limit - self.config.margin)
        return Score(value=-min(max(excess / self.config.margin, 0.0), 1.0))


class EnvironmentReward(Configurable):
    """The sum of the rewards that the environment returned in the turns of a rollout.

    It is 0 if a limit ended the rollout before the environment returned a reward.
    """

    @node
    class Config(Configurable.Config["EnvironmentReward"]):
        """No settings."""

    def __init__(self, cfg: Config):
        self.config = cfg

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return the environment's reward of each rollout. A rollout without one gets an error."""
        return [failed_score(rollout) or self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score:
        if ENVIRONMENT_REWARD not in rollout.metrics and rollout.finish == "length":
            return Score(value=0.0)
        if ENVIRONMENT_REWARD not in rollout.metrics:
            return Score(value=0.0, error=f"the environment returned no reward for the example {rollout.example.id!r}")
        return Score(value=float(rollout.metrics[ENVIRONMENT_REWARD]))
