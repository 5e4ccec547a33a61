"""What a store of objects does, in seven calls; `ObjectStorage` makes a `Storage` of it."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class Missing(Exception):
    """There is no such object."""


class Transient(Exception):
    """The store did not answer, or said that it may later: the same call may work then."""


class Refused(Exception):
    """The store refused the call, or cannot be used at all.

    Args:
        reason: what it said.
        fix: what to do about it.
    """

    def __init__(self, reason: str, fix: str):
        super().__init__(reason)
        self.fix = fix


class Objects(Protocol):
    """The objects of one bucket. Calls may come from several threads.

    They raise `Missing`, `Transient` or `Refused`, and try nothing again themselves.
    """

    def put(self, key: str, data: bytes) -> None:
        """Writes an object whole."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Writes an object where there is none, as the store itself decides; False where there is one."""
        ...

    def get(self, key: str) -> bytes:
        """A whole object."""
        ...

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Bytes of an object; fewer where it ends."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, size) of each object whose key begins with `prefix`."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are deleted already."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copies an object within the store."""
        ...
