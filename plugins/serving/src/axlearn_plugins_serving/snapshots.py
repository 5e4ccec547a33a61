"""Saved recurrent states, from which later requests continue.

Attention keeps every token of a prefix, so a request can continue from any cached block. A recurrent layer keeps only its latest
state, so the engine saves states at block boundaries, within a budget of rows. The least recently used state is replaced first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from axlearn_plugins_serving.blocks import Key


class Snapshots:
    """Rows of a pool of states, by the key of the block after which each state was saved.

    Args:
        first: First row.
        count: Number of rows.
    """

    def __init__(self, first: int, count: int):
        self._free = list(range(first + count - 1, first - 1, -1))
        self._rows: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._read: set[int] = set()  # rows that the step being planned reads

    def find(self, keys: Sequence[Key]) -> tuple[int, int | None]:
        """Return the largest number of leading blocks after which a state is saved, and the state's row.

        Returns (0, None) if there is none.
        """
        for count in range(len(keys), 0, -1):
            row = self._rows.get(keys[count - 1])
            if row is not None:
                return count, row
        return 0, None

    def use(self, key: Key) -> None:
        """Keep a saved state until the planned step is submitted, and mark it as recently used."""
        self._rows.move_to_end(key)
        self._read.add(self._rows[key])

    def submitted(self) -> None:
        """Note that the planned step was submitted. Later steps may overwrite the states that it reads."""
        self._read.clear()

    def take(self) -> int | None:
        """Take a row, replacing a state if all rows are in use. Returns None if no state can be replaced."""
        if self._free:
            return self._free.pop()
        for key, row in self._rows.items():
            if row not in self._read:
                del self._rows[key]
                return row
        return None

    def release(self, row: int) -> None:
        """Return a row without a key."""
        self._free.append(row)

    def register(self, key: Key, row: int) -> None:
        """Set the key of a row from `take`. If a different row already has this key, the row is released."""
        if key in self._rows:
            self._rows.move_to_end(key)
            self.release(row)
        else:
            self._rows[key] = row

    def discard(self, key: Key) -> None:
        """Release the row of a key, if there is one and the planned step does not read it."""
        row = self._rows.get(key)
        if row is not None and row not in self._read:
            del self._rows[key]
            self.release(row)

    def has(self, key: Key) -> bool:
        """Return whether a state is saved under a key."""
        return key in self._rows

    def forget(self) -> None:
        """Release all rows with a key, for example after the weights have changed."""
        self._free += self._rows.values()
        self._rows.clear()
