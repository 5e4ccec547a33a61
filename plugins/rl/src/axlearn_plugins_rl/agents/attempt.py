"""`Attempt`: the calls of one agent, as trajectories."""

import contextvars
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from axlearn_plugins_rl.environments.answer_messages import NumberedReader, read_answer
from axlearn_plugins_rl.environments.chat_history import ChatHistory, Turn
from axlearn_plugins_rl.environments.guarded_calls import derive_seed
from axlearn_plugins_rl.rollout_contracts import Completion, Example, Message, Policy, Rollout, RolloutFinish


@attrs.define(kw_only=True, eq=False)
class Attempt:
    """One attempt of an agent at an example.

    Attributes:
        example: The example.
        policy: The policy.
        seed: Seed of the attempt.
        history: The calls as tokens.
        is_full: Whether a call did not fit into the context.
        failure: The error of the policy, or None.
        calls: Number of answers of the policy.
        messages: The conversation of the last answer, with the answer.
        text: Text of the last answer.
        finish: Reason why the last answer ended.
        numbers: Numbers for the ids of tool calls.
        metrics: Further metrics of the rollout.
    """

    example: Example
    policy: Policy
    seed: int
    history: ChatHistory = attrs.field(init=False)
    is_full: bool = False
    failure: Exception | None = None
    calls: int = 0
    messages: tuple[Message, ...] = ()
    text: str = ""
    finish: RolloutFinish = "stop"
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    metrics: dict[str, float] = attrs.field(factory=dict)
    _contexts: Counter[tuple[int, ...]] = attrs.field(factory=Counter, init=False)

    def __attrs_post_init__(self) -> None:
        self.history = ChatHistory(self.policy.text)

    async def sample(self, call: "AgentCall", turn: Turn, *, max_tokens: int | None, seed: int | None) -> Completion:
        """Let the policy answer a turn, and record the answer.

        Equal calls of an attempt get different seeds. Their order does not depend on the order of other calls.

        Args:
            call: The call.
            turn: The conversation.
            max_tokens: Maximum number of tokens. None uses the limit of the policy.
            seed: Seed that the agent chose, or None.
        """
        repeat, self._contexts[turn.tokens] = self._contexts[turn.tokens], self._contexts[turn.tokens] + 1
        drawn = derive_seed(self.seed, turn.tokens, repeat, seed)
        try:
            completion = await self.policy.sample(turn.tokens, seed=drawn, max_tokens=max_tokens, stop=call.stop)
        except Exception as error:
            self.failure = error
            raise
        assert call.reader is not None
        message = read_answer(call.reader, self.policy.text, turn.tokens, completion, call.stop)
        self.history.add(turn, completion, message)
        self.calls, self.text, self.finish = self.calls + 1, completion.text, completion.finish
        self.messages = (*turn.messages, message)
        return completion

    def rollout(self, *, reward: float | None = None, error: str | None = None) -> Rollout:
        """Return the rollout.

        Args:
            reward: Reward that the agent returned, or None.
            error: Why the agent failed, or None.
        """
        trajectories = self.history.trajectories
        counts = {"turns": float(self.calls), "forks": float(max(0, len(trajectories) - 1))}
        metrics = {**self.metrics, **counts}
        if reward is not None:
            metrics["environment_reward"] = reward
        return Rollout(
            example=self.example,
            seed=self.seed,
            trajectories=trajectories,
            text=self.text,
            messages=self.messages,
            finish="length" if error and self.is_full else "error" if error else self.finish,
            error=None if self.is_full else error,
            metrics=metrics,
        )


@attrs.define(kw_only=True, eq=False)
class AgentCall:
    """A request of an agent.

    Attributes:
        attempt: The attempt.
        turn: The conversation, once it is rendered.
        tools: Tools of the request.
        options: Variables of the chat template.
        stop: Texts that end the answer.
        reader: Reader of the answer.
    """

    attempt: Attempt
    turn: Turn | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    stop: tuple[str, ...] = ()
    reader: NumberedReader | None = None

    def open(self, messages: Sequence[Message]) -> Turn:
        """Return the turn for another answer to a conversation."""
        return self.attempt.history.open(messages, self.tools, self.options)


current_call: contextvars.ContextVar[AgentCall] = contextvars.ContextVar("current_call")
"""The request that is answered."""
