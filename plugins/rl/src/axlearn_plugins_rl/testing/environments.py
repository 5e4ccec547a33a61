"""Suite for environments."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from axlearn_core.config import Node
from axlearn_plugins_rl.rollout_contracts import Environment, Episode, Example, Message, Reply
from axlearn_plugins_rl.testing.rollouts import STRANGE_TEXTS
from axlearn_plugins_transformer.text.conversations import check_conversation


class EnvironmentSuite:
    """Tests that every environment must pass.

    Attributes:
        config: Config of the environment.
        examples: Examples to start episodes with.
        answers: What the policy says in the turns of an episode. The episode must end with the last of them, or earlier.
        rewards: The reward of each turn with the first example, or None if it is not known.
    """

    config: Node[Any]
    examples: Sequence[Example]
    answers: Sequence[str | Message]
    rewards: Sequence[float | None] | None = None

    def environment(self) -> Environment:
        """Build the environment, as a source does."""
        return self.config.build()

    async def play(self, environment: Environment, example: Example, seed: int) -> list[Reply]:
        """Return the replies of an episode to `answers`."""
        episode = await environment.start(example, seed=seed)
        try:
            replies = []
            for answer in self.answers:
                replies.append(await episode.reply(_message(answer)))
                if replies[-1].done:
                    break
            return replies
        finally:
            await episode.close()

    def test_replies_are_valid(self) -> None:
        for example in self.examples:
            for number, reply in enumerate(asyncio.run(self.play(self.environment(), example, 0))):
                location = f"reply {number} to the example {example.id}"
                assert isinstance(reply, Reply), f"{location} is a {type(reply).__name__}"
                assert isinstance(reply.done, bool), f"{location}: done is {reply.done!r}"
                assert reply.reward is None or math.isfinite(reply.reward), f"{location}: the reward is {reply.reward}"
                assert reply.messages or reply.done, f"{location} has no message, but the episode goes on"
                for messages in (reply.messages, reply.history or ()):
                    if messages:
                        check_conversation({"messages": [*messages]}, location, answered=False)
                assert all(m["role"] != "assistant" for m in reply.messages), f"{location} speaks for the policy"

    def test_episodes_end(self) -> None:
        for example in self.examples:
            replies = asyncio.run(self.play(self.environment(), example, 0))
            assert replies[-1].done, f"the episode of {example.id} does not end with the last answer"

    def test_rewards_are_as_expected(self) -> None:
        if self.rewards is None:
            pytest.skip("needs the rewards of the first example: set `rewards`")
        replies = asyncio.run(self.play(self.environment(), self.examples[0], 0))
        assert [reply.reward for reply in replies] == [*self.rewards]

    def test_equal_seeds_give_equal_episodes(self) -> None:
        for example in self.examples:
            one, two = (asyncio.run(self.play(self.environment(), example, 5)) for _ in range(2))
            assert one == two, f"two episodes of {example.id} with the same seed differ"

    def test_episodes_are_independent(self) -> None:
        environment = self.environment()

        async def play_together() -> list[list[Reply]]:
            return await asyncio.gather(
                *(self.play(environment, example, seed) for example in self.examples for seed in (0, 1, 0))
            )

        alone = [
            asyncio.run(self.play(self.environment(), example, seed)) for example in self.examples for seed in (0, 1, 0)
        ]
        assert asyncio.run(play_together()) == alone, "episodes at the same time influence each other"

    def test_episodes_close_after_any_answer(self) -> None:
        async def answer(text: str | None) -> None:
            episode = await self.environment().start(self.examples[0], seed=0)
            try:
                if text is not None:
                    await _reply_or_fail(episode, text)
            finally:
                await episode.close()

        for text in (None, *STRANGE_TEXTS):
            asyncio.run(answer(text))


async def _reply_or_fail(episode: Episode, text: str) -> None:
    """Let an episode reply. It may raise an error, which a source turns into a failed rollout."""
    try:
        reply = await episode.reply(_message(text))
    except Exception:
        return
    assert isinstance(reply, Reply), f"the reply to {text[:40]!r} is a {type(reply).__name__}"


def _message(answer: str | Message) -> Message:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
