"""Suite for sources of rollouts."""

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import attrs
import numpy as np
import pytest

from axlearn_core.config import Node
from axlearn_plugins_rl.rollout_contracts import Example, Rollout, RolloutFinish, RolloutSource, Trajectory
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy, logprob_of

SEEDS = (5, 3, 5, 9)


class RolloutSourceSuite:
    """Tests that every source of rollouts must pass.

    A `ScriptedPolicy` takes the place of the model. Its log-probabilities depend on all tokens before a token, so the suite
    notices if a source encodes drawn tokens again.

    Attributes:
        config: Config of the source.
        examples: Examples to roll out.
        max_context: Maximum number of tokens of the policy. It must have room for all rollouts.
    """

    config: Node[Any]
    examples: Sequence[Example]
    max_context: int = 4096

    def script(self, context: str, seed: int) -> str:
        """Return the answer of the policy to a context. Override it for environments that expect a certain answer."""
        return f"answer {seed} after {len(context)}"

    def policy(self, **options: Any) -> ScriptedPolicy:
        """Return the policy."""
        return ScriptedPolicy(self.script, **{"max_context": self.max_context, "version": 7, **options})

    def source(self) -> RolloutSource:
        """Build the source, as a loop does."""
        return self.config.build()

    def collect(self, example: Example, policy: ScriptedPolicy, seeds: Sequence[int] = SEEDS) -> Sequence[Rollout]:
        """Return the rollouts of an example, and check that there is one for each seed."""
        rollouts = asyncio.run(self.source().collect(example, policy, seeds))
        assert [rollout.seed for rollout in rollouts] == [*seeds], "there must be one rollout for each seed, in order"
        return rollouts

    def test_rollouts_are_complete(self) -> None:
        for example in self.examples:
            for rollout in self.collect(example, self.policy()):
                assert rollout.example == example
                assert rollout.finish in get_args(RolloutFinish), f"finish is {rollout.finish!r}"
                assert rollout.finish != "error", f"the rollout failed: {rollout.error}"
                assert rollout.error is None
                assert isinstance(rollout.text, str)
                assert rollout.trajectories, "a rollout without an error needs a trajectory"
                assert rollout.num_drawn > 0
                assert all(np.isfinite(value) for value in rollout.metrics.values()), rollout.metrics

    def test_tokens_are_those_of_the_policy(self) -> None:
        for example in self.examples:
            policy = self.policy()
            rollouts = self.collect(example, policy)
            for rollout in rollouts:
                for trajectory in rollout.trajectories:
                    self.check_trajectory(trajectory, policy)
            # Environments may take another path for an equal seed only if they are not deterministic.
            drawn = sum(segment.drawn for r in rollouts for t in r.trajectories for segment in t)
            assert drawn >= len(SEEDS), "each rollout must draw tokens"

    def check_trajectory(self, trajectory: Trajectory, policy: ScriptedPolicy) -> None:
        """Check that a trajectory has the tokens and log-probabilities that the policy saw and drew."""
        contexts = {context for context, _ in policy.contexts}
        before: list[int] = []
        assert not trajectory[0].drawn, "a trajectory must begin with the context"
        for segment in trajectory:
            tokens = segment.tokens
            assert (tokens.dtype, tokens.ndim) == (np.int32, 1)
            assert len(tokens) > 0, "a trajectory has an empty segment"
            if segment.drawn:
                assert tuple(before) in contexts, "the tokens before a drawn segment are not what the policy read"
                assert segment.version == policy.version
                assert segment.logprobs is not None, "a drawn segment has no log-probabilities"
                expected = [logprob_of([*before, *tokens[:i].tolist()], int(t)) for i, t in enumerate(tokens)]
                np.testing.assert_array_equal(segment.logprobs, np.array(expected, np.float32))
                assert segment.model_logprobs is not None
            else:
                assert segment.logprobs is None
                assert segment.version is None
            before += tokens.tolist()
        assert len(before) <= policy.max_context

    def test_equal_seeds_give_equal_rollouts(self) -> None:
        for example in self.examples:
            first, _, third, _ = self.collect(example, self.policy())
            (again,) = self.collect(example, self.policy(), SEEDS[:1])
            assert flatten(first) == flatten(third) == flatten(again), "rollouts with equal seeds differ"

    def test_examples_can_be_collected_at_the_same_time(self) -> None:
        async def collect_together() -> Any:
            source, policy = self.source(), self.policy(delay=0.001)
            return await asyncio.gather(*(source.collect(example, policy, SEEDS) for example in self.examples))

        together = asyncio.run(collect_together())
        alone = [self.collect(example, self.policy()) for example in self.examples]
        assert [[*map(flatten, r)] for r in together] == [[*map(flatten, r)] for r in alone], (
            "rollouts influence each other"
        )

    def test_failures_of_the_policy_are_raised(self) -> None:
        class Broken(ScriptedPolicy):
            async def sample(self, *args: Any, **options: Any) -> Any:
                raise MemoryError("the engine is out of memory")

        with pytest.raises(MemoryError):
            self.collect(self.examples[0], Broken(self.script, max_context=self.max_context))


def flatten(rollout: Rollout) -> Any:
    """Return a rollout as values that can be compared with `==`."""

    def convert(_object: Any, _attribute: Any, value: Any) -> Any:
        return (value.tolist(), value.dtype.str) if isinstance(value, np.ndarray) else value

    return attrs.asdict(rollout, value_serializer=convert)
