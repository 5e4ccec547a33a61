"""Files behind a URI: what checkpoints and weights are read from and written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import attrs


@attrs.frozen(order=True)
class StoredFile:
    """A file in a storage: its path below the storage's root, with `/` between parts, and its size."""

    path: str
    bytes: int


class Storage(Protocol):
    """A tree of files below one URI. Paths are relative, with `/` between parts.

    Implementations retry what is worth retrying. They raise `StorageError` for anything that fails, and its subclass
    `MissingFileError` for a file that does not exist.
    """

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """All files whose path begins with `prefix`, sorted by path; empty where there are none."""
        ...

    def read(self, path: str) -> bytes:
        """A whole file, for small ones."""
        ...

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes) with the file from byte `begin` on. A file that ends earlier is a `StorageError`."""
        ...

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes a file, replacing an earlier one. Readers see the old file, the new file or none, never a part."""
        ...

    def commit(self, source: str, target: str) -> None:
        """Makes all files below the folder `source` appear below the new folder `target`, all or none, durably.

        An existing `target` is a `StorageError`, and a missing `source` a `MissingFileError`.
        """
        ...

    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with everything below it. What does not exist is deleted already."""
        ...

    def directory(self) -> Path:
        """A local or mounted directory with these files, created if need be, for programs that take only paths.

        Raises:
            StorageError: it cannot be written, or the storage has no such directory.
        """
        ...
