"""`Storage`, the protocol for backends that store checkpoints and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs


@attrs.frozen(order=True)
class StoredFile:
    """A stored file: its path relative to the root, separated by `/`, and its size."""

    path: str
    bytes: int


MARKER = "manifest.json"
"""Name of the file that is written last and deleted first in a folder. A folder that contains it is complete."""


class Storage(Protocol):
    """A tree of files below a URI. Paths are relative and separated by `/`.

    Implementations retry transient errors. They raise `StorageError` for failures, and its subclass `MissingFileError` if a
    file does not exist. They must be thread-safe.
    """

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """Return all files whose path starts with `prefix`, sorted by path."""
        ...

    def list_names(self, folder: str = "") -> Sequence[str]:
        """Return the sorted names of the files and folders directly in a folder, without listing what the folders contain.

        Args:
            folder: Path that ends in `/`, or empty for the root. It is empty if it does not exist.
        """
        ...

    def read(self, path: str) -> bytes:
        """Return the contents of a small file."""
        ...

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill a byte buffer from a file, starting at byte `begin`. Raise `StorageError` if the file is too short."""
        ...

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write or replace a file atomically. Readers never see a partial file."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file atomically. Return False if it already exists. If several callers race, only one gets True."""
        ...

    def staging(self, target: str) -> str:
        """Return the folder to write to before `commit` turns it into `target`.

        If the backend cannot rename folders, as object stores cannot, this is `target` itself. A folder there is complete
        when it contains `MARKER`, which is written last.
        """
        ...

    def commit(self, source: str, target: str) -> None:
        """Rename the folder `source` to the new folder `target`, atomically and durably.

        If the backend cannot rename, `MARKER` is the last file to appear and the first to disappear. If `source` equals
        `target`, nothing needs to be done.

        Raises:
            StorageError: If `target` already exists.
            MissingFileError: If `source` does not exist.
        """
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder and everything in it, `MARKER` first. No-op if it does not exist."""
        ...

    def directory(self) -> Path:
        """Return a local or mounted directory with these files, for programs that require paths. Create it if necessary.

        Raises:
            StorageError: If the directory is not writable, or if the storage has no directory.
        """
        ...


JOINED_BYTES = 8 * 2**20
"""`JoinsReads.joined_bytes` of an object store that answers after 0.1 s and then sends 85 MB/s, as Amazon S3 does."""


@runtime_checkable
class JoinsReads(Protocol):
    """A storage in which a request costs more than the bytes that it reads, such as an object store.

    Attributes:
        joined_bytes: Reads of fewer bytes are joined with those that follow them in the file.
    """

    joined_bytes: int


class ForeignCheckpoints(Protocol):
    """Checkpoints that a different library wrote. They have no manifest, so their files cannot be verified.

    Attributes:
        writer: Name of the library, for use in messages.
    """

    writer: str

    def steps(self) -> Sequence[int]:
        """Return the steps that have a checkpoint, oldest first."""
        ...

    def arrays(self, step: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype name of each array in a checkpoint by dotted path.

        Raises:
            CheckpointError: If the checkpoint is damaged.
        """
        ...
