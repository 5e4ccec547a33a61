"""`ProcessShare`: the part of a batch that one process of a job rolls out. This module does not import JAX."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class ProcessShare:
    """The share of one process.

    Shares are consecutive parts in the order of the processes, so they do not depend on timing.

    Attributes:
        index: Index of the process.
        count: Number of processes.
    """

    index: int = 0
    count: int = 1

    def select(self, size: int) -> slice:
        """Return the part of a sequence. If the parts cannot be equal, those of the first processes have one item more."""
        return self.select_counts(self.counts(size))

    def counts(self, size: int) -> list[int]:
        """Return the number of items of each process."""
        each, more = divmod(size, self.count)
        return [each + (index < more) for index in range(self.count)]

    def select_counts(self, counts: Sequence[int]) -> slice:
        """Return the part of a sequence of which each process has a number of items."""
        start = sum(counts[: self.index])
        return slice(start, start + counts[self.index])
