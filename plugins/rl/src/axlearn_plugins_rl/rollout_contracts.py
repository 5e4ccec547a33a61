"""Interfaces between the parts of reinforcement learning. This module does not import JAX.

A `Task` has examples. A `RolloutSource` lets a `Policy` answer each example several times, alone or in turns with an
`Environment`. A `Reward` scores the answers, an `Advantage` turns the scores into weights of tokens, and a `Buffer` holds the
groups until the loop trains on them.

The parts exchange tokens. Only tasks, environments and rewards read or write text. The tokens that the policy drew are
never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from axlearn_core.config.offers import offers

if TYPE_CHECKING:
    from axlearn_plugins_transformer.text.processor import TextProcessor

Split = Literal["train", "held_out"]
Message = Mapping[str, Any]
"""A message of a conversation; see `axlearn_plugins_transformer.text.messages`."""
RolloutFinish = Literal["stop", "length", "error"]
"""`stop`: the answer or the episode ended. `length`: the limit of tokens or turns was reached, or the context is full. `error`: an
environment failed."""


@attrs.frozen(kw_only=True)
class Example:
    """A problem of a task.

    Attributes:
        id: Name of the example, unique in its task.
        prompt: Text to continue, or the messages of a conversation, for models with a chat template.
        answer: What the reward or the environment needs to know, such as the reference answer. A JSON value.
        tools: Descriptions of functions that the model may call, for chat templates that use them.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()


@offers("seed")
class Task(Protocol):
    """A set of problems."""

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split. The sequence may create each example when it is indexed.

        The same index must always return the same example. The loop shuffles the indices.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return facts that identify the examples, as JSON values. See `axlearn_core.contracts.parts.Input.describe`."""
        ...


@runtime_checkable
class ScoresAnswers(Protocol):
    """A task that judges answers, for the reward `task`."""

    def score(self, example: Example, text: str) -> float:
        """Return the reward of an answer. It runs in another process, in which the task is built again from its config.

        Args:
            example: An example of the task.
            text: The answer of the policy.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Segment:
    """Consecutive tokens of a trajectory with the same origin.

    Attributes:
        tokens: Token ids, int32 [N].
        drawn: True if the policy drew the tokens, False if they come from a prompt or an environment.
        logprobs: Natural log-probabilities of drawn tokens in the distribution that was sampled from, float32 [N]. None if the
            tokens were not drawn.
        model_logprobs: Log-probabilities of drawn tokens in the model's own distribution, before temperature, top-p and biases,
            float32 [N]. None if the tokens were not drawn.
        version: Version of the weights that drew the tokens: the number of training steps that had updated them. None if the
            tokens were not drawn.
        experts: Experts that the engine used for each token that it read, int16 [N, L, K] for L layers and K experts per token. -1
            for tokens that it has not read, such as the last one. None if the policy records no experts.
        kept: Tokens that could be drawn in place of each drawn token, int32 [N, W], padded with -1. All are -1 if every token could
            be drawn, or more than W. None if the policy records none, or the tokens were not drawn.
    """

    tokens: np.ndarray
    drawn: bool = False
    logprobs: np.ndarray | None = None
    model_logprobs: np.ndarray | None = None
    version: int | None = None
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None


Trajectory = tuple[Segment, ...]
"""The tokens that the model has read and written, from the first token of the context, in order."""


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """One attempt at an example.

    Attributes:
        example: The example.
        seed: Seed of the attempt. With equal weights and an engine in the mode `parity`, the same seed gives the same rollout.
        trajectories: The trajectories to train on. There is one, unless the environment rewrote the history: tokens before the
            change and after it then have different contexts.
        text: Text of the last answer.
        messages: The conversation, if the prompt has messages or there are several turns.
        finish: Reason why it ended.
        error: What failed if `finish` is `error`.
        metrics: Numbers to average over rollouts and log, such as the number of turns.
    """

    example: Example
    seed: int
    trajectories: tuple[Trajectory, ...]
    text: str
    messages: tuple[Message, ...] = ()
    finish: RolloutFinish = "stop"
    error: str | None = None
    metrics: Mapping[str, float] = {}

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the policy drew."""
        return sum(len(s.tokens) for trajectory in self.trajectories for s in trajectory if s.drawn)


@attrs.frozen(kw_only=True)
class Score:
    """The reward of one rollout.

    Attributes:
        value: The reward.
        parts: The rewards that `value` combines, by name.
        metrics: Other numbers to average over rollouts and log.
        error: Why the reward could not be computed, or None. The rollout is then not trained on.
    """

    value: float
    parts: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}
    error: str | None = None


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """The rollouts of one example, with a score for each."""

    example: Example
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    @property
    def is_dead(self) -> bool:
        """True if all rewards are equal, so that a comparison within the group teaches nothing."""
        return len({score.value for score in self.scores if score.error is None}) <= 1


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """Tokens that the policy drew after a context.

    Attributes:
        segment: The tokens, including the one that ended the output.
        text: Text of the tokens, without the one that ended the output.
        finish: `stop` or `length`.
        context_experts: Experts of the tokens of the context; see `Segment.experts`.
    """

    segment: Segment
    text: str
    finish: RolloutFinish
    context_experts: np.ndarray | None = None


class Policy(Protocol):
    """The model that is trained, as rollouts see it.

    Attributes:
        text: Converts between the model's text and tokens.
        max_context: Maximum number of tokens in a context and its completion.
    """

    text: TextProcessor
    max_context: int

    @property
    def sampling(self) -> Mapping[str, float]:
        """The sampling parameters by name: `temperature`, and `top_k`, `top_p` and `min_p` if they are set."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that draw tokens now. See `Segment.version`."""
        ...

    async def sample(
        self, context: Sequence[int], *, seed: int, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Draw tokens after a context, with the sampling parameters of the policy.

        Args:
            context: Token ids; at least one.
            seed: Seed of this completion.
            max_tokens: Maximum number of tokens. None uses the policy's own limit.
            stop: Texts that end the completion.

        Raises:
            RequestError: If the context is full, or a token has no row in the model.
        """
        ...


@attrs.frozen(kw_only=True)
class Reply:
    """The answer of an environment to a turn of the policy.

    Attributes:
        messages: New messages, such as the result of a tool. Empty if the episode ends.
        done: Whether the episode ends.
        reward: Reward of this turn, or None if only the `Reward` judges. The rollout's metric `environment_reward` is the sum.
        history: The conversation before `messages`, if the environment rewrites it. None continues the present one.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    history: tuple[Message, ...] | None = None


class Episode(Protocol):
    """One attempt at an example in an environment."""

    async def reply(self, message: Message) -> Reply:
        """Return the answer to a message of the policy, whose role is `assistant`."""
        ...

    async def close(self) -> None:
        """Free the resources of the episode. Called once, also after an error."""
        ...


@runtime_checkable
class HasPrompt(Protocol):
    """An episode that chooses the first messages itself.

    Attributes:
        prompt: The messages, which replace those of the example.
    """

    prompt: Sequence[Message]


@runtime_checkable
class OffersTools(Protocol):
    """An episode that offers tools, in addition to those of the example.

    Attributes:
        tools: Descriptions of the functions that the model may call, in the form of the chat API.
    """

    tools: Sequence[Mapping[str, Any]]


@runtime_checkable
class ReportsMetrics(Protocol):
    """An episode that reports metrics.

    Attributes:
        metrics: Numbers to average over rollouts and log. Read after the last turn.
    """

    metrics: Mapping[str, float]


@offers()
class Environment(Protocol):
    """Answers the policy in turns, for example with the results of tools.

    An episode may also implement `HasPrompt`, `OffersTools` or `ReportsMetrics`.
    """

    async def start(self, example: Example, *, seed: int) -> Episode:
        """Start an episode. Equal seeds must give equal episodes."""
        ...


class RolloutSource(Protocol):
    """Turns examples into rollouts."""

    async def collect(self, example: Example, policy: Policy, seeds: Sequence[int]) -> Sequence[Rollout]:
        """Return one rollout for each seed, in the order of the seeds.

        A failure of the environment is a rollout with `finish="error"`. A failure of the policy is raised.
        """
        ...


@offers("task")
class Reward(Protocol):
    """Scores rollouts. Its slot offers `task`, the task with the examples."""

    async def score(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return a score for each rollout of one example. A failure is a score with an `error`."""
        ...


class Advantage(Protocol):
    """Computes the advantages of tokens from rewards."""

    def compute(
        self, groups: Sequence[Group], batch: Sequence[Group] | None = None
    ) -> Sequence[Sequence[Sequence[np.ndarray]]]:
        """Return the advantages of the groups that this process rolled out.

        Args:
            groups: The groups.
            batch: All groups of the batch, for statistics. Those of other processes have only scores, metrics and numbers of
                drawn tokens; see `group_scores.decode_scores`. None if `groups` are the whole batch.

        Returns:
            For each group, rollout and trajectory, float32 [number of tokens]. Tokens that the policy did not draw have 0.
        """
        ...


class Buffer(Protocol):
    """Holds batches of groups between their rollout and their training step, and bounds how old they get.

    Batch number n is trained on by step n, which turns version n of the weights into version n + 1.
    """

    def admits(self, number: int, version: int) -> bool:
        """Return True if the rollouts of a batch may start with this version of the weights."""
        ...

    def put(self, number: int, groups: Sequence[Group]) -> None:
        """Add a batch."""
        ...

    def take(self, number: int) -> Sequence[Group]:
        """Remove and return a batch. Raise `KeyError` if the buffer does not hold it."""
        ...

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the batches that the buffer holds, in ascending order."""
        ...

    def get_state(self) -> Any:
        """Return the batches as a tree of JSON values and NumPy arrays. See `axlearn_core.contracts.capabilities.KeepsState`."""
        ...

    def set_state(self, state: Any) -> None:
        """Restore the batches that `get_state` returned."""
        ...


class WeightSync(Protocol):
    """Brings the weights of a training state to the engine that samples."""

    def push(self, weights: Any, version: int) -> int:
        """Use weights from now on, and return the number of bytes that were copied.

        Args:
            weights: `axlearn_core.compose.ModelWeights` of the training program. The next training step may donate them.
            version: Their version.
        """
        ...
