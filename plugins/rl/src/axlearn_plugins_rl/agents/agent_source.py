"""`AgentSource`: rollouts by an async function that talks to the policy through a client of the OpenAI API."""

import contextlib
import importlib
import math
from collections.abc import AsyncIterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_plugins_rl.agents.attempt import AgentCall, Attempt, current_call
from axlearn_plugins_rl.agents.policy_service import PolicyService
from axlearn_plugins_rl.environments.guarded_calls import CallFailedError, guard_call
from axlearn_plugins_rl.environments.optional_library import import_library
from axlearn_plugins_rl.environments.rollout_formats import RolloutFormats
from axlearn_plugins_rl.rollout_contracts import Example, Policy, Rollout
from axlearn_plugins_rl.rollout_jobs import run_together
from axlearn_plugins_serving.server.app import create_app

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from starlette.types import ASGIApp, Receive, Scope, Send


class AgentSource(Configurable):
    """A `RolloutSource` that calls an agent. Subclasses implement `solve` and are registered as components.

    The calls of an agent become trajectories. A call whose messages continue an earlier answer continues its trajectory, with the
    exact tokens; other calls start a new one. Nothing is sent over a network.
    """

    @node
    class Config(Configurable.Config["AgentSource"]):
        """Limits and formats.

        Attributes:
            time_limit: Maximum duration of an attempt, in seconds.
            formats: Formats of tool calls and reasoning, and variables of the chat template.
        """

        time_limit: float = setting(default=600.0, gt=0)
        formats: Node[RolloutFormats] = RolloutFormats.Config()

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg
        self._formats = cfg.formats.build()
        self._app: tuple[Policy, ASGIApp] | None = None

    async def solve(self, client: "AsyncOpenAI", example: Example) -> float | None:
        """Solve an example by calls to the policy.

        Args:
            client: Client whose only model is `policy`. Use it as any other `openai.AsyncOpenAI`.
            example: The example.

        Returns:
            The reward of the attempt, or None if only the `Reward` judges. The metric `environment_reward` has the value.
        """
        raise NotImplementedError

    async def run(self, app: "ASGIApp", attempt: Attempt) -> float | None:
        """Run the agent, and return the reward of the attempt or None.

        Args:
            app: Application of the policy.
            attempt: The attempt.

        Raises:
            CallFailedError: The agent failed or took too long.
        """
        async with connect(app, attempt) as client:
            solving = self.solve(client, attempt.example)
            return _check_reward(await guard_call(solving, "solve", self.config.time_limit))

    async def collect(self, example: Example, policy: Policy, seeds: Sequence[int]) -> Sequence[Rollout]:
        """See `RolloutSource.collect`."""
        if self._app is None or self._app[0] is not policy:
            self._app = policy, create_app(PolicyService.open(policy, self._formats))
        app = self._app[1]
        return await run_together(self._attempt(app, Attempt(example=example, policy=policy, seed=s)) for s in seeds)

    async def _attempt(self, app: "ASGIApp", attempt: Attempt) -> Rollout:
        reward = error = None
        try:
            reward = await self.run(app, attempt)
        except CallFailedError as failure:
            error = str(failure)
        if attempt.failure is not None:
            raise attempt.failure
        return attempt.rollout(reward=reward, error=error)


@contextlib.asynccontextmanager
async def connect(app: "ASGIApp", attempt: Attempt) -> "AsyncIterator[AsyncOpenAI]":
    """Yield a client whose calls belong to an attempt.

    Args:
        app: The application.
        attempt: The attempt.
    """

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        before = current_call.set(AgentCall(attempt=attempt))
        try:
            await app(scope, receive, send)
        finally:
            current_call.reset(before)

    openai: Any = import_library("openai", "agents")
    base = openai.DefaultAsyncHttpxClient.__mro__[1]  # of httpx or httpx2, which differ between versions of openai
    library: Any = importlib.import_module(base.__module__.partition(".")[0])
    transport = library.ASGITransport(app=answer, client=("127.0.0.1", 0))
    http_client = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)
    async with openai.AsyncOpenAI(
        api_key="policy", base_url="http://policy/v1", http_client=http_client, max_retries=0
    ) as client:
        yield client


def _check_reward(reward: object) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise CallFailedError(f"solve returned {reward!r}, but a reward is a finite number or None")
    return float(reward)
