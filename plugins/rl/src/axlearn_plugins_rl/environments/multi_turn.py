"""`MultiTurn`: rollouts in turns with an environment."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.errors import InputError
from axlearn_plugins_rl.environments.answer_messages import new_reader, read_answer
from axlearn_plugins_rl.environments.chat_history import ChatHistory, Turn
from axlearn_plugins_rl.environments.guarded_calls import CallFailedError, derive_seed, guard_call
from axlearn_plugins_rl.environments.rollout_formats import RolloutFormats
from axlearn_plugins_rl.rollout_contracts import (
    Completion,
    Environment,
    Episode,
    Example,
    HasPrompt,
    Message,
    OffersTools,
    Policy,
    Reply,
    ReportsMetrics,
    Rollout,
    RolloutFinish,
)
from axlearn_plugins_rl.rollout_jobs import run_together

_log = logging.getLogger("axlearn.rl")


class MultiTurn(Configurable):
    """A `RolloutSource` that lets the policy and an environment take turns.

    The context of a turn is the exact tokens of the turns before it; see `ChatHistory`. An example whose prompt is a text becomes a
    message of the user.

    Attributes:
        environment: The environment.
    """

    @node
    class Config(Configurable.Config["MultiTurn"]):
        """Limits and formats.

        Attributes:
            environment: The environment.
            max_turns: Maximum number of answers of the policy. The rollout then ends with `length`.
            max_tokens: Maximum number of tokens of an answer. None uses the limit of the policy.
            stop: Texts that end an answer.
            time_limit: Maximum duration of a call of the environment, in seconds.
            formats: Formats of tool calls and reasoning, and variables of the chat template.
        """

        environment: Node[Environment] = REQUIRED
        max_turns: int = setting(default=8, ge=1)
        max_tokens: int | None = setting(default=None, ge=1)
        stop: tuple[str, ...] = ()
        time_limit: float = setting(default=60.0, gt=0)
        formats: Node[RolloutFormats] = RolloutFormats.Config()

    def __init__(self, cfg: Config):
        self.config = cfg
        self.environment: Environment = cfg.environment.build()
        self.formats = cfg.formats.build()

    async def collect(self, example: Example, policy: Policy, seeds: Sequence[int]) -> Sequence[Rollout]:
        """See `RolloutSource.collect`."""
        return await run_together(self._play(example, policy, seed) for seed in seeds)

    async def _play(self, example: Example, policy: Policy, seed: int) -> Rollout:
        """Return one rollout. Close its episode in any case."""
        game, cfg = _Game(self, example, policy, seed), self.config
        try:
            episode = await guard_call(self.environment.start(example, seed=seed), "start", cfg.time_limit)
        except CallFailedError as error:
            return game.finish("error", str(error))
        try:
            finish = await game.play(episode)
            rollout = game.finish(finish)
        except CallFailedError as error:
            rollout = game.finish("error", str(error))
        finally:
            closing = None
            try:
                await guard_call(episode.close(), "close", cfg.time_limit)
            except CallFailedError as error:
                closing = str(error)
                _log.warning("an episode of example %s was not closed: %s", example.id, closing)
        return rollout if closing is None or rollout.error else attrs.evolve(rollout, finish="error", error=closing)


class _Game:
    """The state of one rollout."""

    def __init__(self, source: MultiTurn, example: Example, policy: Policy, seed: int):
        self._source, self._example, self._policy, self._seed = source, example, policy, seed
        self._history = ChatHistory(policy.text)
        self._messages: list[Message] = []
        self._text = ""
        self._turns = 0
        self._reward: float | None = None
        self._metrics: dict[str, float] = {}
        self._numbers = source.formats.new_numbers()

    async def play(self, episode: Episode) -> RolloutFinish:
        """Take turns until the episode ends. Raises `CallFailedError` if the environment fails."""
        cfg = self._source.config
        tools = (*self._example.tools, *(episode.tools if isinstance(episode, OffersTools) else ()))
        self._source.formats.check_tools(self._policy.text, tools)
        self._messages = list(episode.prompt if isinstance(episode, HasPrompt) else prompt_messages(self._example))
        if not self._messages:
            raise CallFailedError(f"example {self._example.id} and its episode have no messages")
        while True:
            turn = self._open(tools)
            if len(turn.tokens) >= self._policy.max_context:
                return "length"
            completion = await self._sample(turn)
            message = self._read(turn, completion, tools)
            self._history.add(turn, completion, message)
            self._turns, self._text = self._turns + 1, completion.text
            self._messages.append(message)
            if completion.finish != "stop":
                return "length"
            reply = await guard_call(episode.reply(message), "reply", cfg.time_limit)
            self._record(reply, episode)
            if reply.done:
                return "stop"
            if self._turns >= cfg.max_turns:
                return "length"

    def finish(self, finish: RolloutFinish, error: str | None = None) -> Rollout:
        """Return the rollout."""
        trajectories = self._history.trajectories
        metrics = {**self._metrics, "turns": float(self._turns), "forks": float(max(0, len(trajectories) - 1))}
        if self._reward is not None:
            metrics["environment_reward"] = self._reward
        return Rollout(
            example=self._example,
            seed=self._seed,
            trajectories=trajectories,
            text=self._text,
            messages=tuple(self._messages),
            finish=finish,
            error=error,
            metrics=metrics,
        )

    def _open(self, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """Return the next context. Only the first prompt may stop the training: later ones depend on what the policy wrote."""
        try:
            return self._history.open(self._messages, tools, self._source.formats.config.options)
        except InputError as error:
            if not self._turns:
                raise
            raise CallFailedError(str(error)) from error

    async def _sample(self, turn: Turn) -> Completion:
        cfg, room = self._source.config, self._policy.max_context - len(turn.tokens)
        limit = None if cfg.max_tokens is None else min(cfg.max_tokens, room)
        seed = derive_seed(self._seed, self._turns) if self._turns else self._seed
        return await self._policy.sample(turn.tokens, seed=seed, max_tokens=limit, stop=cfg.stop)

    def _read(self, turn: Turn, completion: Completion, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        text = self._policy.text
        reader = new_reader(self._source.formats.choose(text), tools, turn.text, self._numbers)
        return read_answer(reader, text, turn.tokens, completion, self._source.config.stop)

    def _record(self, reply: Reply, episode: Episode) -> None:
        """Continue the conversation with a reply."""
        if reply.reward is not None:
            self._reward = (self._reward or 0.0) + float(reply.reward)
        if isinstance(episode, ReportsMetrics):
            self._metrics = {name: float(value) for name, value in episode.metrics.items()}
        if reply.history is not None:
            self._messages = list(reply.history)
        self._messages += reply.messages
        if not reply.done and not reply.messages and reply.history is None:
            raise CallFailedError("reply: the episode continues, but the reply has no messages")


def prompt_messages(example: Example) -> tuple[Message, ...]:
    """Return the messages of an example. A text becomes a message of the user."""
    prompt = example.prompt
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
