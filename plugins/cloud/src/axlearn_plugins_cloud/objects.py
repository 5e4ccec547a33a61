"""Interface of an object store, in seven calls. `ObjectStorage` builds a `Storage` on top of it."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class MissingObjectError(Exception):
    """The object does not exist."""


class TransientError(Exception):
    """The store did not respond, or asked the client to retry later."""


class RefusedError(Exception):
    """The store refused the call, or cannot be used.

    Args:
        reason: Message from the store.
        fix: Advice for the user.
    """

    def __init__(self, reason: str, fix: str):
        super().__init__(reason)
        self.fix = fix


class Objects(Protocol):
    """The objects in one bucket. Implementations must be thread-safe.

    Calls raise `MissingObjectError`, `TransientError` or `RefusedError`. They do not retry.

    Attributes:
        batch: Maximum number of keys in a call of `delete`.
    """

    batch: int

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object atomically. Return False if it already exists."""
        ...

    def get(self, key: str) -> bytes:
        """Return a whole object."""
        ...

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Return a range of an object, or fewer bytes if the object is shorter."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, size) of each object whose key starts with `prefix`."""
        ...

    def list_names(self, folder: str) -> Iterator[str]:
        """Yield the name of each object and folder directly in a folder, whose key is empty or ends in `/`."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Objects that do not exist are ignored."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store."""
        ...
