"""Environments of the package `verifiers`, which run in another process; see `verifiers_server`."""

import functools
import hashlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from axlearn_core.config import REQUIRED, Configurable, node, setting
from axlearn_core.errors import InputError
from axlearn_plugins_rl.agents.agent_source import AgentSource
from axlearn_plugins_rl.agents.attempt import Attempt
from axlearn_plugins_rl.agents.policy_url import open_url
from axlearn_plugins_rl.environments.guarded_calls import call_in_thread, guard_call
from axlearn_plugins_rl.prompts import content_key
from axlearn_plugins_rl.rollout_contracts import Example, Split
from axlearn_plugins_rl.tasks.generated_task import LazyExamples
from axlearn_plugins_transformer.text.sources import is_held_out

if TYPE_CHECKING:
    from starlette.types import ASGIApp

START = (
    "start it with `python verifiers_server.py TASKSET` in the environment that has verifiers (docs/rl_environments.md)"
)


class VerifiersError(Exception):
    """Raised if the server cannot run an episode."""


class VerifiersTask(Configurable):
    """The examples of a server of `verifiers_server`. The answer of an example is its number on the server."""

    @node
    class Config(Configurable.Config["VerifiersTask"]):
        """The server.

        Attributes:
            url: URL of the server, such as `http://localhost:8100`.
            validation_fraction: Share of the examples to hold out, by a hash of their prompts.
            time_limit: Maximum duration of the request for the examples, in seconds.
        """

        url: str = REQUIRED
        validation_fraction: float = setting(default=0.1, ge=0, lt=1)
        time_limit: float = setting(default=60.0, gt=0)

    def __init__(self, cfg: Config):
        self.config = cfg

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split.

        Raises:
            InputError: The server does not answer, or lists no examples.
        """
        held_out = np.array([self._is_held_out(example) for example in self._examples], bool)
        numbers = np.flatnonzero(held_out if split == "held_out" else ~held_out)
        return LazyExamples(self._examples.__getitem__, numbers)

    def describe(self) -> Mapping[str, Any]:
        """Return the number of examples and a hash of their contents."""
        text = "".join(content_key(example) for example in self._examples)
        return {"examples": len(self._examples), "hash": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def _is_held_out(self, example: Example) -> bool:
        return is_held_out(content_key(example), self.config.validation_fraction)

    @functools.cached_property
    def _examples(self) -> list[Example]:
        url = f"{self.config.url.rstrip('/')}/examples"
        try:
            answer = request_json(url, None, self.config.time_limit)
            rows = [(str(row["id"]), row["prompt"]) for row in answer["examples"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"the examples of verifiers cannot be read from {url}\n    got: {error!r}\n    fix: {START}"
            ) from error
        if not rows:
            raise InputError(f"{url} lists no examples\n    fix: serve a taskset that has examples")
        return [
            Example(id=f"{number}-{name}", prompt=prompt if isinstance(prompt, str) else tuple(prompt), answer=number)
            for number, (name, prompt) in enumerate(rows)
        ]


class VerifiersSource(AgentSource):
    """Rollouts of an environment of `verifiers`, for the examples of a `VerifiersTask`.

    The server runs the episode and calls the policy at a URL of this process. Every call is recorded as tokens. The metric
    `environment_reward` is the reward of the episode.
    """

    @node
    class Config(AgentSource.Config):
        """The server.

        Attributes:
            url: URL of the server, such as `http://localhost:8100`.
            host: Address of this process that the server can reach.
        """

        url: str = REQUIRED
        host: str = "127.0.0.1"

    config: Config  # type: ignore[assignment]

    async def run(self, app: "ASGIApp", attempt: Attempt) -> float | None:
        """Run an episode on the server; see `AgentSource.run`."""
        cfg = self.config
        async with open_url(app, attempt, cfg.host) as url:
            fields = {"example": attempt.example.answer, "url": url, "model": "policy"}
            request = call_in_thread(request_json, f"{cfg.url.rstrip('/')}/rollouts", fields, cfg.time_limit)
            answer = await guard_call(_read_episode(request), "the episode", cfg.time_limit)
        attempt.metrics.update(answer["metrics"])
        return answer["reward"]


async def _read_episode(request: Any) -> dict[str, Any]:
    """Return the checked answer of the server."""
    answer = await request
    if answer.get("error"):
        raise VerifiersError(str(answer["error"])[:500])
    reward, metrics = answer.get("reward"), answer.get("metrics") or {}
    finite = [value for value in (reward, *metrics.values()) if value is not None]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in finite):
        raise VerifiersError(f"the server answered {json.dumps(answer)[:300]}")
    return {"reward": reward, "metrics": {f"verifiers_{name}": float(value) for name, value in metrics.items()}}


def request_json(url: str, fields: Mapping[str, Any] | None, seconds: float) -> Any:
    """Send a request without a proxy, and return the JSON answer.

    Args:
        url: The URL.
        fields: Fields to post, or None for a GET request.
        seconds: Time limit.

    Raises:
        OSError: The server does not answer, or answers with an error, whose text the message has.
        ValueError: The answer is not JSON.
    """
    body = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise OSError(f"status {error.code}: {error.read().decode(errors='replace')[:300]}") from error
