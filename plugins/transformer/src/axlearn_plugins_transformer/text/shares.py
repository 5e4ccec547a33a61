"""Distribute the rows of a batch among the sources of a mixture.

This module does not import Grain.
"""

from collections.abc import Sequence

import attrs

_SCATTER = 0x9E3779B1  # 2**32 / the golden ratio: the bits of its products look random


@attrs.frozen
class Shares:
    """Assigns each row to a part of the data.

    The rows of a turn, one per shard, are adjacent in a fixed pattern, so every batch has each part's share of rows. The
    assignment of shards to the places of the pattern changes from turn to turn. Otherwise, a shard could end up always reading
    the same part.

    Attributes:
        proportions: Integer weight of each part.
        num_shards: Rows per turn.
    """

    proportions: tuple[int, ...]
    num_shards: int

    @classmethod
    def from_weights(cls, weights: Sequence[float], num_shards: int) -> "Shares":
        """Return the shares of parts with these weights. The smallest weight becomes 100."""
        return cls(tuple(int(w * 100 / min(weights)) for w in weights), num_shards)

    def row(self, turn: int, shard: int) -> tuple[int, int]:
        """Return the part of a shard's row in a turn.

        Also return the number of earlier rows of that part across all shards.
        """
        if len(self.proportions) == 1:
            return 0, turn * self.num_shards + shard
        scattered = (turn * _SCATTER % 2**32) >> 7
        return self._entry(turn * self.num_shards + (shard + scattered) % self.num_shards)

    def most(self, part: int, rows: int) -> int:
        """Return the maximum number of rows from a part among `rows` adjacent rows."""
        return min(rows, rows * self.proportions[part] // sum(self.proportions) + 2)

    def _entry(self, index: int) -> tuple[int, int]:
        # Each part takes its share of the entries that earlier parts leave, evenly spaced.
        count, next_count, remaining = index, index + 1, sum(self.proportions)
        for part, proportion in enumerate(self.proportions):
            others, next_others = (n * (remaining - proportion) // remaining for n in (count, next_count))
            if count - others != next_count - next_others:
                return part, count - others
            count, next_count, remaining = others, next_others, remaining - proportion
        raise AssertionError("every entry belongs to a part")
