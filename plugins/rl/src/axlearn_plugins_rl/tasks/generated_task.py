"""A base class for tasks whose examples are computed, and the sequence of examples that such tasks return."""

import functools
import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import InputError
from axlearn_plugins_rl.prompts import check_example, content_key
from axlearn_plugins_rl.rollout_contracts import Example, Split
from axlearn_plugins_transformer.text.sources import is_held_out


class LazyExamples(Sequence[Example]):
    """Examples that are created when they are indexed.

    Args:
        create: Returns the example of a number.
        numbers: Number of each example, int [N].
    """

    def __init__(self, create: Callable[[int], Example], numbers: np.ndarray):
        self._create, self._numbers = create, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Example]:
        return (self._create(number) for number in self._numbers.tolist())

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> "LazyExamples": ...

    def __getitem__(self, index: int | slice) -> "Example | LazyExamples":
        if isinstance(index, slice):
            return LazyExamples(self._create, self._numbers[index])
        return self._create(int(self._numbers[index]))


class GeneratedTask(Configurable):
    """A task whose examples are computed by `example`, a method of the subclass.

        class Addition(GeneratedTask):
            def example(self, index, rng):
                a, b = rng.randrange(100), rng.randrange(100)
                return Example(id=str(index), prompt=f"{a} + {b} = ", answer=str(a + b))

    A hash of an example's content decides whether the example is held out, so equal examples are always on the same side. The
    first call of `examples` or `describe` computes all examples once.

    Args:
        cfg: Config of the task.
        seed: Seed of the run. It is used if the config has no seed.
    """

    @node
    class Config(Configurable.Config["GeneratedTask"]):
        """Number of examples.

        Attributes:
            size: Number of examples to compute, for training and held out together.
            validation_fraction: Share of the examples to hold out.
            seed: Seed of the examples. None uses the seed of the run.
        """

        size: int = setting(default=1000, ge=1)
        validation_fraction: float = setting(default=0.1, ge=0, lt=1)
        seed: int | None = None

    def __init__(self, cfg: Config, *, seed: int = 0):
        self.config = cfg
        self.seed = seed if cfg.seed is None else cfg.seed

    @abstractmethod
    def example(self, index: int, rng: random.Random) -> Example:
        """Return an example.

        Args:
            index: Number of the example, from 0 to `size - 1`.
            rng: Random numbers that depend only on the seed of the task and on the index.
        """
        ...

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split. They are computed when they are indexed.

        Raises:
            InputError: All examples are held out, or an example is invalid.
        """
        held_out = self._facts[0]
        numbers = np.flatnonzero(held_out if split == "held_out" else ~held_out)
        if split == "train" and not len(numbers):
            raise InputError(
                f"{type(self).__qualname__}: all {self.config.size} examples are held out, so there is nothing to train on\n"
                "    fix: raise size, or lower validation_fraction"
            )
        return LazyExamples(self._create, numbers)

    def describe(self) -> Mapping[str, Any]:
        """Return the number of examples and a hash of their contents."""
        return {"examples": self.config.size, "hash": self._facts[1]}

    @functools.cached_property
    def _facts(self) -> tuple[np.ndarray, str]:
        """Whether each example is held out, and a hash of all examples."""
        held_out, digest = np.zeros(self.config.size, bool), hashlib.sha256()
        for index in range(self.config.size):
            key = content_key(self._create(index))
            held_out[index] = is_held_out(key, self.config.validation_fraction)
            digest.update(key.encode())
        return held_out, digest.hexdigest()[:16]

    def _create(self, index: int) -> Example:
        example = self.example(index, random.Random(f"{self.seed}:{index}"))
        return check_example(example, f"{type(self).__qualname__}: example {index}")
