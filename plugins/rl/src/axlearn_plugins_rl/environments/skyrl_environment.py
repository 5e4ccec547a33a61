"""Environments of SkyRL-Gym (https://skyrl.readthedocs.io)."""

from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.config import REQUIRED, Configurable, node
from axlearn_core.errors import unknown
from axlearn_plugins_rl.environments.guarded_calls import call_in_thread
from axlearn_plugins_rl.environments.multi_turn import prompt_messages
from axlearn_plugins_rl.environments.optional_library import import_library
from axlearn_plugins_rl.rollout_contracts import Episode, Example, Message, Reply


class SkyrlEnvironment(Configurable):
    """An `Environment` that SkyRL-Gym registers.

    The answer of an example becomes the ground truth of the environment. If it is a mapping, it is passed on as `extras`. The
    environment reads the text of the policy, so set `formats: {tool_parser: none, reasoning_parser: none}` of the source if the
    environment parses calls or reasoning itself.
    """

    @node
    class Config(Configurable.Config["SkyrlEnvironment"]):
        """Name and settings of the environment.

        Attributes:
            name: Id of the environment, such as `gsm8k_multi_turn`.
            options: Settings of the environment (`env_config`).
            extras: Values for each episode, such as `max_turns`. The answer of an example overrides them.
        """

        name: str = REQUIRED
        options: Mapping[str, Any] = {}  # nodes are frozen
        extras: Mapping[str, Any] = {}

    def __init__(self, cfg: Config):
        self.config = cfg
        self._library: Any = import_library("skyrl_gym", "skyrl-gym")
        registration: Any = import_library("skyrl_gym.envs.registration", "skyrl-gym")
        if cfg.name not in registration.registry:
            raise unknown("environment of SkyRL-Gym", cfg.name, registration.registry)
        self._options = import_library("omegaconf", "skyrl-gym").OmegaConf.create(_thaw(cfg.options))

    async def start(self, example: Example, *, seed: int) -> Episode:
        """See `Environment.start`. SkyRL-Gym has no seeds."""
        answer = example.answer
        facts = answer if isinstance(answer, Mapping) else {"reward_spec": {"method": "rule", "ground_truth": answer}}
        extras = {**_thaw(self.config.extras), **_thaw(facts)}
        messages = [dict(message) for message in prompt_messages(example)]

        def begin() -> tuple[Any, Sequence[Message]]:
            env = self._library.make(self.config.name, env_config=self._options, extras=extras)
            prompt, _ = env.init(messages)
            return env, prompt

        return _SkyrlEpisode(*await call_in_thread(begin))


class _SkyrlEpisode:
    """An episode of SkyRL-Gym.

    Attributes:
        prompt: The first messages.
        metrics: Metrics of the environment that are numbers.
    """

    def __init__(self, env: Any, prompt: Sequence[Message]):
        self._env, self.prompt = env, tuple(prompt)
        self.metrics: dict[str, float] = {}

    async def reply(self, message: Message) -> Reply:
        """See `Episode.reply`."""
        step = await call_in_thread(self._env.step, str(message.get("content") or ""))
        numbers = {name: value for name, value in self._env.get_metrics().items() if isinstance(value, (int, float))}
        self.metrics = {name: float(value) for name, value in numbers.items()}
        return Reply(messages=tuple(step["observations"]), done=bool(step["done"]), reward=float(step["reward"]))

    async def close(self) -> None:
        """See `Episode.close`."""
        await call_in_thread(self._env.close)


def _thaw(value: Any) -> Any:
    """Return a frozen value of a config as dictionaries and lists."""
    if isinstance(value, Mapping):
        return {name: _thaw(item) for name, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, (list, tuple)) else value
