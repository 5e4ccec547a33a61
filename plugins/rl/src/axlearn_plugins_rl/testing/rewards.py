"""Suite for rewards."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from axlearn_core.config import Node
from axlearn_plugins_rl.rollout_contracts import Reward, Rollout, Score, Task
from axlearn_plugins_rl.testing.rollouts import STRANGE_TEXTS, answer_rollout


class RewardSuite:
    """Tests that every reward must pass.

    Attributes:
        config: Config of the reward.
        cases: Rollouts of one example with the reward of each. `answer_rollout` creates a rollout.
        task: The task with the examples, for rewards that ask it.
    """

    config: Node[Any]
    cases: Sequence[tuple[Rollout, float]]
    task: Task | None = None

    def reward(self) -> Reward:
        """Build the reward, as a loop does."""
        return self.config.build(task=self.task)

    def score(self, reward: Reward, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Score rollouts, and check that there is one score for each."""
        scores = asyncio.run(reward.score(rollouts))
        assert len(scores) == len(rollouts), f"{len(rollouts)} rollouts have {len(scores)} scores"
        return scores

    def test_rewards_are_as_expected(self) -> None:
        assert len(self.cases) > 1, "the suite needs several cases"
        scores = self.score(self.reward(), [rollout for rollout, _ in self.cases])
        for (rollout, expected), score in zip(self.cases, scores, strict=True):
            assert score.error is None, f"the text {rollout.text!r} fails: {score.error}"
            assert score.value == pytest.approx(expected), f"the text {rollout.text!r} has the reward {score.value}"

    def test_scores_have_the_order_of_the_rollouts(self) -> None:
        rollouts, reward = [rollout for rollout, _ in self.cases], self.reward()
        scores = self.score(reward, rollouts)
        assert [*reversed(self.score(reward, rollouts[::-1]))] == [*scores], (
            "the order of the rollouts changes their scores"
        )

    def test_no_rollouts_have_no_scores(self) -> None:
        assert [*self.score(self.reward(), [])] == []

    def test_groups_can_be_scored_at_the_same_time(self) -> None:
        rollouts, reward = [rollout for rollout, _ in self.cases], self.reward()

        async def score_twice() -> Any:
            return await asyncio.gather(reward.score(rollouts), reward.score(rollouts))

        one, two = asyncio.run(score_twice())
        assert [*one] == [*two] == [*self.score(self.reward(), rollouts)], "equal rollouts have different scores"

    def test_failed_rollouts_have_errors(self) -> None:
        rollout = self.cases[0][0]
        failed = answer_rollout(rollout.example, "", finish="error", error="the tool is broken")
        scores = self.score(self.reward(), [rollout, failed])
        assert scores[0].error is None
        assert scores[1].error, "a rollout whose environment failed must not be trained on"

    def test_any_text_can_be_scored(self) -> None:
        rollouts = [answer_rollout(self.cases[0][0].example, text) for text in STRANGE_TEXTS]
        for rollout, score in zip(rollouts, self.score(self.reward(), rollouts), strict=True):
            numbers = [score.value, *score.parts.values(), *score.metrics.values()]
            assert all(map(math.isfinite, numbers)), f"the text {rollout.text[:40]!r} has the reward {score}"

    def test_rollouts_do_not_change(self) -> None:
        rollout = self.cases[0][0]
        tokens = [segment.tokens.copy() for trajectory in rollout.trajectories for segment in trajectory]
        fields = (rollout.text, dict(rollout.metrics), rollout.example, rollout.messages)
        self.score(self.reward(), [rollout])
        assert (rollout.text, dict(rollout.metrics), rollout.example, rollout.messages) == fields
        segments = [segment.tokens for trajectory in rollout.trajectories for segment in trajectory]
        assert all((a == b).all() for a, b in zip(tokens, segments, strict=True)), "the reward changed the tokens"
