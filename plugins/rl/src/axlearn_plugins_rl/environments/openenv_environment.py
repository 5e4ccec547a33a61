"""Environments of OpenEnv servers (https://github.com/meta-pytorch/OpenEnv).

A session is a WebSocket: the client sends `reset` and `step`, and the server answers each with an observation, a reward and whether
the episode is done. The HTTP endpoints of the protocol keep no state between two requests, so episodes cannot use them.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from axlearn_core.config import REQUIRED, Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments.multi_turn import prompt_messages
from axlearn_plugins_rl.environments.optional_library import import_library
from axlearn_plugins_rl.rollout_contracts import Episode, Example, Message, Reply

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnvError(Exception):
    """Raised if a server answers with an error or with something else than an observation."""


class OpenEnvEnvironment(Configurable):
    """An `Environment` on a server that speaks OpenEnv. Each episode opens a connection.

    The first observation follows the messages of the example.
    """

    @node
    class Config(Configurable.Config["OpenEnvEnvironment"]):
        """Address of the server and the fields of its messages.

        Attributes:
            url: URL of the server, such as `http://localhost:8000`.
            action: Field of an action that receives the text of the policy.
            observation: Field of an observation that has the text for the policy. None shows the whole observation as JSON.
            reset: Further values for the start of an episode.
            connect_limit: Maximum duration of the connection, in seconds.
            max_bytes: Maximum size of a message from the server.
        """

        url: str = REQUIRED
        action: str = "message"
        observation: str | None = None
        reset: Mapping[str, Any] = {}  # nodes are frozen
        connect_limit: float = setting(default=10.0, gt=0)
        max_bytes: int = setting(default=16 * 2**20, ge=1024)

    def __init__(self, cfg: Config):
        self.config = cfg
        parts = urlsplit(cfg.url)
        if parts.scheme not in _SCHEMES or not parts.netloc:
            raise RequestError(f"url is not the URL of a server\n    got: {cfg.url!r}\n    expected: http://HOST:PORT")
        path = f"{parts.path.rstrip('/')}/ws"
        self._url = urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))
        self._client: Any = import_library("websockets.asyncio.client", "openenv")

    async def start(self, example: Example, *, seed: int) -> Episode:
        """See `Environment.start`."""
        cfg = self.config
        socket = await self._client.connect(
            self._url, open_timeout=cfg.connect_limit, max_size=cfg.max_bytes, proxy=None
        )
        episode = _OpenEnvEpisode(cfg, socket)
        try:
            observation, _, _ = await episode.send("reset", {"seed": seed % 2**31, **cfg.reset})
        except BaseException:
            await socket.close()
            raise
        messages = prompt_messages(example) if example.prompt else ()
        episode.prompt = (*messages, *_as_message(observation))
        return episode


class _OpenEnvEpisode:
    """A session.

    Attributes:
        prompt: The first messages.
    """

    def __init__(self, cfg: OpenEnvEnvironment.Config, socket: Any):
        self._config, self._socket = cfg, socket
        self.prompt: tuple[Message, ...] = ()

    async def reply(self, message: Message) -> Reply:
        """See `Episode.reply`."""
        text, reward, is_over = await self.send("step", {self._config.action: str(message.get("content") or "")})
        return Reply(messages=() if is_over else _as_message(text), done=is_over, reward=reward)

    async def close(self) -> None:
        """See `Episode.close`."""
        await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def send(self, kind: str, data: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Send a message. Return the text of the observation, the reward or None, and whether the episode is done."""
        await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(await self._socket.recv())
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict) or answer.get("type") != "observation":
            raise OpenEnvError(f"the server answered {kind} with {json.dumps(answer)[:300]}")
        observation, reward = content.get("observation", {}), content.get("reward")
        return self._text(observation), None if reward is None else float(reward), bool(content.get("done"))

    def _text(self, observation: Any) -> str:
        field = self._config.observation
        if field is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or field not in observation:
            names = ", ".join(observation) if isinstance(observation, dict) else type(observation).__name__
            raise OpenEnvError(f"the observation has no field {field!r}; it has {names}")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_message(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)
