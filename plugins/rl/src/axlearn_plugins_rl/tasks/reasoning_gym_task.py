"""The `reasoning-gym` task: problems that the library Reasoning Gym generates and judges."""

import importlib
import random
import warnings
from collections.abc import Mapping
from typing import Any

from axlearn_core.config import REQUIRED, node
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest, unknown
from axlearn_plugins_rl.patterns import ANSWER, extract_answer
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.tasks.generated_task import GeneratedTask


class ReasoningGymTask(GeneratedTask):
    """Problems of a dataset of Reasoning Gym (Stojanovski et al., 2025, arXiv:2505.24760).

    The reward `task` scores an answer as the dataset does. The answer is the text in `<answer>` tags, or the whole text if there
    are none. Needs the extra `reasoning-gym` of axlearn-plugins-rl.

    Args:
        cfg: Config of the task.
        seed: Seed of the run. It is used if the config has no seed.

    Raises:
        RequestError: The library is not installed, or does not have the dataset.
        ConfigError: The dataset rejects its options.
    """

    @node
    class Config(GeneratedTask.Config):
        """The dataset.

        Attributes:
            dataset: Name of the dataset, such as `basic_arithmetic`.
            options: Settings of the dataset, such as `{max_digits: 3}`.
        """

        dataset: str = REQUIRED
        options: Mapping[str, Any] = {}

    config: Config

    def __init__(self, cfg: Config, *, seed: int = 0):
        super().__init__(cfg, seed=seed)
        self._dataset = _create_dataset(cfg, self.seed)

    def example(self, index: int, rng: random.Random) -> Example:
        """Return a problem of the dataset. The dataset has its own random numbers, which depend on the seed."""
        entry = self._dataset[index]
        return Example(id=str(index), prompt=entry["question"], answer=entry["answer"])

    def score(self, example: Example, text: str) -> float:
        """Return the dataset's score of an answer; see `axlearn_plugins_rl.rollout_contracts.ScoresAnswers`."""
        return float(self._dataset.score_answer(extract_answer(ANSWER, text).strip(), self._dataset[int(example.id)]))

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the base class and the name of the dataset."""
        return {**super().describe(), "dataset": self.config.dataset}


def _create_dataset(cfg: ReasoningGymTask.Config, seed: int) -> Any:
    factory = _import_factory()
    if cfg.dataset not in factory.DATASETS:
        raise unknown("dataset of Reasoning Gym", cfg.dataset, factory.DATASETS)
    names = {*vars(factory.DATASETS[cfg.dataset][1]())} - {"seed", "size"}
    if wrong := sorted({*cfg.options} - names):
        raise ConfigError(
            Problem(
                path=f"options.{name}",
                message=f"is not an option of the dataset {cfg.dataset}",
                expected=f"one of {', '.join(sorted(names))}",
                nearest=nearest(name, names),
            )
            for name in wrong
        )
    try:
        return factory.create_dataset(cfg.dataset, seed=seed, size=cfg.size, **cfg.options)
    except Exception as error:  # each dataset checks its options in its own way
        raise ConfigError(
            Problem(
                path="options",
                message=f"the dataset {cfg.dataset} rejects its options: {type(error).__name__}: {error}",
                got=", ".join(f"{name}={value!r}" for name, value in cfg.options.items()),
            )
        ) from None


def _import_factory() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of its requirements has code that newer versions of Python warn about
            return importlib.import_module("reasoning_gym.factory")
    except ImportError:
        raise RequestError(
            "the task `reasoning-gym` requires the package reasoning-gym, which is not installed\n"
            "    fix: pip install 'axlearn-plugins-rl[reasoning-gym]'"
        ) from None
