"""The `weighted` reward: a sum of other rewards."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from axlearn_core.config import REQUIRED, Configurable, Node, node
from axlearn_core.errors import ConfigError, Problem, nearest
from axlearn_core.plugins.registry import registry
from axlearn_plugins_rl.rollout_contracts import Reward, Rollout, Score


class WeightedReward(Configurable):
    """A weighted sum of rewards. The scores contain the value of each part.

    Args:
        cfg: Config of the reward.
        offered: Arguments for the parts, such as the task.
    """

    @node
    class Config(Configurable.Config["WeightedReward"]):
        """The parts: `{type: weighted, parts: {exact: 1.0, format: 0.1}}`.

        Attributes:
            parts: Weight of each part, by name. A name that `rewards` does not have is a registered component with its default
                settings.
            rewards: Rewards by name, for parts that need settings.
        """

        parts: Mapping[str, float] = REQUIRED
        rewards: Mapping[str, Node[Reward]] = {}

        def validate(self) -> Iterable[Problem]:
            """Check that each part is a reward, and that each reward has a weight."""
            if not self.parts:
                yield Problem(path="parts", message="is empty", expected="weights of rewards, such as {exact: 1.0}")
            components = registry().claims["components"]
            for name, weight in self.parts.items():
                if name not in self.rewards and name not in components:
                    yield Problem(
                        path=f"parts.{name}",
                        message="is neither in `rewards` nor a registered component",
                        nearest=nearest(name, [*self.rewards, *components]),
                        fix="correct the name, or add the reward to `rewards`",
                    )
                if not abs(weight) < float("inf"):
                    yield Problem(path=f"parts.{name}", message="is not a finite number", got=str(weight))
            for name in self.rewards:
                if name not in self.parts:
                    yield Problem(path=f"rewards.{name}", message="has no weight", fix=f"add {name} to `parts`")

    def __init__(self, cfg: Config, **offered: Any):
        self.config = cfg
        self._rewards = {name: _build_part(name, cfg.rewards.get(name), offered) for name in cfg.parts}

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return the sums. A rollout for which a part fails has an error."""
        results = await asyncio.gather(*(reward.score(rollouts) for reward in self._rewards.values()))
        by_rollout = zip(*results, strict=True)
        return [self._combine(dict(zip(self._rewards, scores, strict=True))) for scores in by_rollout]

    def _combine(self, scores: Mapping[str, Score]) -> Score:
        metrics: dict[str, float] = {}
        for score in scores.values():
            for name, value in score.metrics.items():
                metrics[name] = max(metrics[name], value) if name in metrics else value
        errors = [score.error for score in scores.values() if score.error is not None]
        return Score(
            value=sum(self.config.parts[name] * score.value for name, score in scores.items()),
            parts={name: score.value for name, score in scores.items()},
            metrics=metrics,
            error="; ".join(dict.fromkeys(errors)) or None,
        )


@runtime_checkable
class _ScoresRollouts(Protocol):
    """The methods of a `Reward`, without the offers of its slot, which `isinstance` would look for."""

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]: ...


def _build_part(name: str, config: Node[Reward] | None, offered: Mapping[str, Any]) -> Reward:
    if config is None:
        config = registry().component(name)()
    owner = type(config).owner
    if owner is None or (isinstance(owner, type) and not issubclass(owner, _ScoresRollouts)):
        raise _not_a_reward(name, owner or type(config))
    try:
        reward = config.build(**offered)
    except ConfigError as error:
        raise ConfigError(Problem(path=f"parts.{name}", message=str(error))) from None
    if not isinstance(reward, _ScoresRollouts):
        raise _not_a_reward(name, type(reward))
    return reward


def _not_a_reward(name: str, kind: type) -> ConfigError:
    return ConfigError(
        Problem(
            path=f"parts.{name}",
            message="the component is not a reward",
            got=kind.__qualname__,
            expected="a component with a method `score` for rollouts, such as exact",
        )
    )
