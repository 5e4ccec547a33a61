"""Games of TextArena for one player (Guertler et al., 2025, https://arxiv.org/abs/2504.11442)."""

import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from axlearn_core.config import REQUIRED, Configurable, node
from axlearn_core.errors import unknown
from axlearn_plugins_rl.environments.guarded_calls import call_in_thread
from axlearn_plugins_rl.environments.multi_turn import prompt_messages
from axlearn_plugins_rl.environments.optional_library import import_library
from axlearn_plugins_rl.rollout_contracts import Episode, Example, Message, Reply

T = TypeVar("T")

_RANDOM = threading.Lock()


class TextArenaEnvironment(Configurable):
    """An `Environment` that plays a game of TextArena. The prompt of the game follows the messages of the example."""

    @node
    class Config(Configurable.Config["TextArenaEnvironment"]):
        """Name and settings of the game.

        Attributes:
            name: Id of the game, such as `GuessTheNumber-v0`.
            options: Settings of the game.
        """

        name: str = REQUIRED
        options: Mapping[str, Any] = {}  # nodes are frozen

    def __init__(self, cfg: Config):
        self.config = cfg
        self._library: Any = import_library("textarena", "textarena")
        games: Any = import_library("textarena.envs.registration", "textarena")
        if cfg.name not in games.ENV_REGISTRY:
            raise unknown("game of TextArena", cfg.name, games.ENV_REGISTRY)

    async def start(self, example: Example, *, seed: int) -> Episode:
        """See `Environment.start`."""
        episode = _TextArenaEpisode(self._library, seed)
        await call_in_thread(episode.begin, self.config, prompt_messages(example) if example.prompt else ())
        return episode


class _TextArenaEpisode:
    """A game.

    Attributes:
        prompt: The first messages.
    """

    def __init__(self, library: Any, seed: int):
        self._library, self._state = library, random.Random(seed).getstate()
        self._seed = seed
        self._env: Any = None
        self.prompt: tuple[Message, ...] = ()

    def begin(self, cfg: TextArenaEnvironment.Config, messages: tuple[Message, ...]) -> None:
        """Start the game. The call blocks."""
        self._env = self._library.make(cfg.name, **cfg.options)
        self._with_random(lambda: self._env.reset(num_players=1, seed=self._seed % 2**32))
        self.prompt = (*messages, *self._observe())

    async def reply(self, message: Message) -> Reply:
        """See `Episode.reply`."""
        return await call_in_thread(self._step, str(message.get("content") or ""))

    async def close(self) -> None:
        """Do nothing. A game holds no resources."""

    def _step(self, action: str) -> Reply:
        env = self._env
        is_over, _ = self._with_random(lambda: env.step(action=action))
        if not is_over:
            return Reply(messages=self._observe())
        rewards, _ = env.close()
        return Reply(done=True, reward=float(rewards[0]))

    def _observe(self) -> tuple[Message, ...]:
        """Return what the game has said since the last call, without the actions of the player."""
        kinds = self._library.ObservationType
        texts = [
            text for _, text, kind in self._env.state.get_current_player_observation() if kind != kinds.PLAYER_ACTION
        ]
        return ({"role": "user", "content": "\n".join(texts)},)

    def _with_random(self, function: Callable[[], T]) -> T:
        """Call a function with the random state of this game, because games draw from Python's global state."""
        with _RANDOM:
            before = random.getstate()
            random.setstate(self._state)
            try:
                return function()
            finally:
                self._state = random.getstate()
                random.setstate(before)
