"""Files behind a URI: what checkpoints and weights are read from and written to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs


@attrs.frozen(order=True)
class StoredFile:
    """A file in a storage: its path below the storage's root, with `/` between parts, and its size."""

    path: str
    bytes: int


MARKER = "manifest.json"
"""The file that is written last into a folder and deleted first: a folder with it is complete."""


class Storage(Protocol):
    """A tree of files below one URI. Paths are relative, with `/` between parts.

    Implementations retry what is worth retrying. They raise `StorageError` for anything that fails, and its subclass
    `MissingFileError` for a file that does not exist. Several threads may call them at once.
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

    def create(self, path: str, data: bytes) -> bool:
        """Writes a small file where there is none. False where there is one: of several callers one gets True."""
        ...

    def staging(self, target: str) -> str:
        """The folder to write what `commit` makes `target`.

        It is `target` itself where folders cannot be renamed, as in object stores: there `MARKER`, which is written last,
        says that a folder is complete.
        """
        ...

    def commit(self, source: str, target: str) -> None:
        """Makes all files below the folder `source` appear below the new folder `target`, durably.

        All or none appear at once. In a storage that cannot rename, `MARKER` is the last to appear and the first to go.
        Where `source` is `target`, everything is in its place.

        An existing `target` is a `StorageError`, and a missing `source` a `MissingFileError`.
        """
        ...

    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with everything below it, `MARKER` first. What does not exist is deleted already."""
        ...

    def directory(self) -> Path:
        """A local or mounted directory with these files, created if need be, for programs that take only paths.

        Raises:
            StorageError: it cannot be written, or the storage has no such directory.
        """
        ...


class ForeignCheckpoints(Protocol):
    """Checkpoints in a folder that another library wrote. They have no manifest, so nothing can verify their files.

    Attributes:
        writer: the name of the library, for people.
    """

    writer: str

    def steps(self) -> Sequence[int]:
        """The steps that have a checkpoint, oldest first."""
        ...

    def arrays(self, step: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Dotted path -> (shape, name of the dtype) of each array in a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        ...
