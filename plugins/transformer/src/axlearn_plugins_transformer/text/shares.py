"""How the sources of a mixture share the rows of a batch. Imports no Grain."""

from collections.abc import Sequence

import attrs

_SCATTER = 0x9E3779B1  # 2**32 / the golden ratio: the bits of its products look random


@attrs.frozen
class Shares:
    """Which part of the data gives each row.

    The rows of a turn, one of each shard, are neighbours in a fixed pattern, so that every batch has each part's share of
    rows. Which shard takes which place of the pattern changes from turn to turn; otherwise a shard could read the same
    part for ever.

    Attributes:
        proportions: whole numbers, one for each part.
        num_shards: rows of a turn.
    """

    proportions: tuple[int, ...]
    num_shards: int

    @classmethod
    def of(cls, weights: Sequence[float], num_shards: int) -> "Shares":
        """Those of parts with these weights. The least weight becomes 100."""
        return cls(tuple(int(w * 100 / min(weights)) for w in weights), num_shards)

    def row(self, turn: int, shard: int) -> tuple[int, int]:
        """The part that gives a shard's row of a turn, and how many rows of all shards it gave before."""
        if len(self.proportions) == 1:
            return 0, turn * self.num_shards + shard
        scattered = (turn * _SCATTER % 2**32) >> 7
        return self._entry(turn * self.num_shards + (shard + scattered) % self.num_shards)

    def most(self, part: int, rows: int) -> int:
        """The most rows that a part has among so many neighbours."""
        return min(rows, rows * self.proportions[part] // sum(self.proportions) + 2)

    def _entry(self, index: int) -> tuple[int, int]:
        # Each part takes its share of the entries that the parts before it leave, spread evenly.
        before, after, remaining = index, index + 1, sum(self.proportions)
        for part, proportion in enumerate(self.proportions):
            left, left_after = (n * (remaining - proportion) // remaining for n in (before, after))
            if before - left != after - left_after:
                return part, before - left
            before, after, remaining = left, left_after, remaining - proportion
        raise AssertionError("every entry belongs to a part")
