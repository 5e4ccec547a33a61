"""Endless sequences of numbers, reshuffled every epoch, without repeats in a window.

This module does not import Grain.
"""

import functools
from collections.abc import Callable

import attrs
import numpy as np

Permutation = Callable[[int], int]
"""Index into an endless sequence -> number below `count`. Each number occurs once in every `count` indices."""

SHUFFLE_RATIO = 4
"""An epoch is shuffled as a whole if it is at least this many times as long as the window."""


@attrs.frozen
class Cycle:
    """An endless sequence of the numbers below `count`.

    Each number occurs once per epoch, and any `window` consecutive numbers are distinct. If `count` is less than
    `window`, any `count` consecutive numbers are distinct. Shards that each read one number at the same time therefore
    never read the same one, as long as there are enough numbers.

    The window restricts shuffling if there are few numbers. With at least `SHUFFLE_RATIO * window` numbers, every epoch is
    a new permutation, except that its first numbers must differ from the last numbers of the previous epoch. With fewer
    numbers, their order is drawn once, and every epoch shuffles blocks of it. With at most `window` numbers, every epoch
    has the same order.

    Attributes:
        count: Number of elements in an epoch.
        window: Number of consecutive numbers that must be distinct.
        seed: Seed of the block shuffles.
        permutation: Shuffles a whole epoch. None disables shuffling.
    """

    count: int
    window: int
    seed: int
    permutation: Permutation | None

    def __call__(self, index: int) -> int:
        """Return the number at `index`."""
        if self.permutation is None:
            return index % self.count
        epoch, position = divmod(index, self.count)
        if self.count < SHUFFLE_RATIO * self.window:
            return int(_blocks_of_epoch(self.count, self.window, self.seed, epoch)[position])
        position = _swaps(self, epoch).get(position, position)
        return int(self.permutation(epoch * self.count + position))


@attrs.frozen
class Permutations:
    """A new NumPy permutation for each epoch. All numbers of an epoch are in memory.

    Attributes:
        count: Number of elements in an epoch.
        seed: Random seed.
    """

    count: int
    seed: int

    def __call__(self, index: int) -> int:
        """Return the number at `index`."""
        epoch, position = divmod(index, self.count)
        return int(_permutation(self.count, self.seed, epoch)[position])


def shuffle_blocks(order: np.ndarray, window: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle blocks of `order`.

    If the results for all epochs are joined, any `window` consecutive numbers are distinct.

    Args:
        order: Order of the numbers before the shuffle, the same in every epoch.
        window: Number of consecutive numbers that must be distinct, at most the length of `order`.
        rng: Random generator for the epoch.
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
def _swaps(cycle: Cycle, epoch: int) -> dict[int, int]:
    """Return the positions of an epoch to swap.

    After the swaps, the epoch's start does not repeat the end of the previous epoch. The end of an epoch does not change, so
    each epoch depends only on the one before it.
    """
    assert cycle.permutation is not None
    if epoch == 0:
        return {}
    start, width = epoch * cycle.count, cycle.window - 1
    last = {cycle.permutation(start - i) for i in range(1, cycle.window)}
    later = (i for i in range(width, cycle.count) if cycle.permutation(start + i) not in last)
    swaps: dict[int, int] = {}
    for i in range(width):
        if cycle.permutation(start + i) in last:
            j = next(later)
            swaps |= {i: j, j: i}
    return swaps
