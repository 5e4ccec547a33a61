"""Endless sequences of numbers, shuffled anew in every epoch, whose neighbours are different. Imports no Grain."""

import functools
from collections.abc import Callable

import attrs
import numpy as np

Permutation = Callable[[int], int]
"""Index of an endless sequence -> number below `count`; each number once in every `count` indices."""

FREE = 4
"""With this many times more numbers than the window, an epoch is shuffled as a whole."""


@attrs.frozen
class Cycle:
    """The numbers below `count` without end: each once per epoch, and any `window` in a row different.

    If `count` is below `window`, any `count` in a row are different. Shards that read one number each at the same time
    therefore never read the same one, as long as there are enough.

    A window leaves less freedom to shuffle when there are few numbers. From `FREE * window` numbers on, every epoch is a
    permutation of its own, in which only the first numbers must not be those that the epoch before ended with. With fewer,
    the numbers are put into an order once, and every epoch shuffles blocks of it. With no more than `window`, every
    epoch has that same order.

    Attributes:
        count: how many numbers there are.
        window: how many neighbours are different.
        seed: of the shuffles of blocks.
        permutation: shuffles a whole epoch. If it is None, nothing is shuffled.
    """

    count: int
    window: int
    seed: int
    permutation: Permutation | None

    def __call__(self, index: int) -> int:
        """The number at `index`."""
        if self.permutation is None:
            return index % self.count
        epoch, position = divmod(index, self.count)
        if self.count < FREE * self.window:
            return int(_blocks_of_epoch(self.count, self.window, self.seed, epoch)[position])
        position = _exchanges(self, epoch).get(position, position)
        return int(self.permutation(epoch * self.count + position))


@attrs.frozen
class Permutations:
    """Each epoch a permutation that NumPy draws. All numbers of an epoch are in memory."""

    count: int
    seed: int

    def __call__(self, index: int) -> int:
        """The number at `index`."""
        epoch, position = divmod(index, self.count)
        return int(_permutation(self.count, self.seed, epoch)[position])


def shuffle_blocks(order: np.ndarray, window: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffles blocks of `order` so that its repetitions have any `window` neighbours different.

    Args:
        order: what every epoch begins with.
        window: how many neighbours are different; at most all of `order` are.
        rng: of this epoch.
    """
    size = max(1, len(order) - window + 1)
    if size == 1:
        return order
    return np.concatenate([rng.permutation(block) for block in np.array_split(order, -(-len(order) // size))])


@functools.lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


@functools.lru_cache(maxsize=64)
def _blocks_of_epoch(count: int, window: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng((seed, count)).permutation(count)
    return shuffle_blocks(order, window, np.random.default_rng((seed, count, epoch)))


@functools.lru_cache(maxsize=64)
def _exchanges(cycle: Cycle, epoch: int) -> dict[int, int]:
    """Positions of an epoch that change places, so that its start has nothing of the end of the epoch before.

    The end of an epoch stays as it is: no epoch depends on more than the one before it.
    """
    assert cycle.permutation is not None
    if epoch == 0:
        return {}
    start, width = epoch * cycle.count, cycle.window - 1
    ended = {cycle.permutation(start - i) for i in range(1, cycle.window)}
    later = (i for i in range(width, cycle.count) if cycle.permutation(start + i) not in ended)
    exchanges: dict[int, int] = {}
    for i in range(width):
        if cycle.permutation(start + i) in ended:
            j = next(later)
            exchanges |= {i: j, j: i}
    return exchanges
