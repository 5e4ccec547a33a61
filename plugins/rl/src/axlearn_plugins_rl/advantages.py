"""Advantages of rollouts, computed from their rewards. This module does not import JAX.

All drawn tokens of a rollout have the same advantage. A rollout whose score has an error has the advantage 0, and does not affect
the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from axlearn_core.config import Configurable, node, setting
from axlearn_plugins_rl.rollout_contracts import Group, Rollout, Trajectory

TokenAdvantages = Sequence[Sequence[Sequence[np.ndarray]]]
"""For each group, rollout and trajectory, float32 [number of tokens]."""


class GroupAdvantage(Configurable):
    """Compares each rollout with the other rollouts of its example: `(r - mean) / (std + epsilon)`.

    This is the advantage of GRPO (Shao et al., 2024, arXiv 2402.03300). The standard deviation has the divisor G - 1 for G
    rollouts. Groups with equal rewards, or with fewer than two rewards, have the advantage 0.
    """

    @node
    class Config(Configurable.Config["GroupAdvantage"]):
        """The comparison.

        Attributes:
            scale: Divide by the standard deviation of the `group` or of all rewards of the `batch`, or do not divide: `none`
                (Dr. GRPO; Liu et al., 2025, arXiv 2503.20783).
            leave_one_out: Compare with the mean of the other rollouts (RLOO; Ahmadian et al., 2024, arXiv 2402.14740).
            epsilon: Added to the standard deviation.
        """

        scale: Literal["group", "batch", "none"] = "group"
        leave_one_out: bool = False
        epsilon: float = setting(default=1e-4, ge=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def compute(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> TokenAdvantages:
        """See `rollout_contracts.Advantage`."""
        everything = np.concatenate([np.zeros(0), *(_rewards(group) for group in batch or groups)])

        def compare(group: Group) -> np.ndarray:
            rewards = _rewards(group)
            if len(rewards) < 2 or group.is_dead:
                return np.zeros_like(rewards)
            centered = rewards - rewards.mean()
            if self.cfg.leave_one_out:
                centered *= len(rewards) / (len(rewards) - 1)
            if self.cfg.scale == "none":
                return centered
            scope = rewards if self.cfg.scale == "group" else everything
            return centered / (scope.std(ddof=1) + self.cfg.epsilon)

        return _spread(groups, compare)


class BatchAdvantage(Configurable):
    """Standardizes rewards over the batch: `(r - mean) / (std + epsilon)` (REINFORCE++; Hu et al., 2025, arXiv 2501.03262)."""

    @node
    class Config(Configurable.Config["BatchAdvantage"]):
        """The statistics.

        Attributes:
            group_baseline: First subtract the mean reward of each example (REINFORCE++-baseline).
            weighting: Whether `tokens` or `rollouts` count equally in the mean and the standard deviation.
            epsilon: Added to the standard deviation.
        """

        group_baseline: bool = False
        weighting: Literal["tokens", "rollouts"] = "tokens"
        epsilon: float = setting(default=1e-8, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def compute(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> TokenAdvantages:
        """See `rollout_contracts.Advantage`."""
        batch = batch or groups
        values = [self._values(group) for group in batch]
        weights = [
            np.array([float(rollout.num_drawn) for rollout in _scored(group)])
            if self.cfg.weighting == "tokens"
            else np.ones(len(value))
            for group, value in zip(batch, values, strict=True)
        ]
        everything, weight = np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0), *weights])
        total = max(weight.sum(), 1.0)
        mean = (everything * weight).sum() / total
        deviation = np.sqrt(((everything - mean) ** 2 * weight).sum() / total)
        return _spread(groups, lambda group: (self._values(group) - mean) / (deviation + self.cfg.epsilon))

    def _values(self, group: Group) -> np.ndarray:
        rewards = _rewards(group)
        return rewards - rewards.mean() if self.cfg.group_baseline and len(rewards) else rewards


class RewardAdvantage(Configurable):
    """Uses the reward, minus a baseline (REINFORCE; Williams, 1992).

    For an objective with a critic, use no baseline. The critic replaces the advantages.
    """

    @node
    class Config(Configurable.Config["RewardAdvantage"]):
        """The baseline.

        Attributes:
            baseline: Decay of a running mean of the rewards of earlier batches, which is subtracted. The first batch uses its
                own mean. None for no baseline.
        """

        baseline: float | None = setting(default=None, ge=0, lt=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._mean: float | None = None

    def compute(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> TokenAdvantages:
        """See `rollout_contracts.Advantage`. Call it once for each batch, in order, because it updates the baseline."""
        if self.cfg.baseline is None:
            return _spread(groups, _rewards)
        rewards = np.concatenate([np.zeros(0), *(_rewards(group) for group in batch or groups)])
        mean = float(rewards.mean()) if len(rewards) else self._mean or 0.0
        baseline = mean if self._mean is None else self._mean
        self._mean = self.cfg.baseline * baseline + (1 - self.cfg.baseline) * mean
        return _spread(groups, lambda group: _rewards(group) - baseline)

    def get_state(self) -> Any:
        """Return the running mean. See `axlearn_core.contracts.capabilities.KeepsState`."""
        return {"mean": self._mean}

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`."""
        self._mean = state["mean"]


def _rewards(group: Group) -> np.ndarray:
    """Return the rewards without errors, float64 [rollouts]."""
    return np.array([score.value for score in group.scores if score.error is None], np.float64)


def _scored(group: Group) -> list[Rollout]:
    """Return the rollouts whose score has no error."""
    return [r for r, score in zip(group.rollouts, group.scores, strict=True) if score.error is None]


def _spread(groups: Sequence[Group], compute: Callable[[Group], np.ndarray]) -> TokenAdvantages:
    """Return token advantages from the function's value for each rollout that has a reward."""
    result = []
    for group in groups:
        values = iter(compute(group))
        result.append(
            [
                [_token_advantages(t, value) for t in rollout.trajectories]
                for rollout, score in zip(group.rollouts, group.scores, strict=True)
                for value in [0.0 if score.error is not None else float(next(values))]
            ]
        )
    return result


def _token_advantages(trajectory: Trajectory, value: float) -> np.ndarray:
    parts = [np.full(len(segment.tokens), value if segment.drawn else 0.0, np.float32) for segment in trajectory]
    return np.concatenate([np.zeros(0, np.float32), *parts])
