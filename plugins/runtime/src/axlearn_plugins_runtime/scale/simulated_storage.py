"""A storage in memory that counts the requests of one process."""

import builtins
import threading
from collections.abc import Iterable
from pathlib import Path

from axlearn_core.contracts.storage import JOINED_BYTES, MARKER, StoredFile
from axlearn_core.errors import MissingFileError, StorageError
from axlearn_plugins_runtime.scale.storage_models import Use

LISTED = 1000
"""Number of names in one answer to a listing, and of keys in one request that deletes."""


class SimulatedFiles:
    """Files in memory that all simulated processes share."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.lock = threading.Lock()


class SimulatedStorage:
    """An object store, as one process sees it. Implements `axlearn_core.contracts.storage.Storage`.

    Attributes:
        files: Files of all processes.
        use: Requests of this process.
        joined_bytes: See `axlearn_core.contracts.storage.JoinsReads`.
    """

    joined_bytes = JOINED_BYTES

    def __init__(self, files: SimulatedFiles):
        self.files, self.use = files, Use()

    def list(self, prefix: str = "") -> builtins.list[StoredFile]:
        """Return all files whose path starts with `prefix`."""
        with self.files.lock:
            files = sorted(StoredFile(p, len(d)) for p, d in self.files.data.items() if p.startswith(prefix))
        self._count(reads=1 + len(files) // LISTED)
        return files

    def list_names(self, folder: str = "") -> builtins.list[str]:
        """Return the names of the files and folders directly in a folder."""
        with self.files.lock:
            paths = [p.removeprefix(folder) for p in self.files.data if p.startswith(folder)]
        names = sorted({path.partition("/")[0] for path in paths})
        self._count(reads=1 + len(names) // LISTED)
        return names

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        data = self.files.data.get(path)
        self._count(reads=1, read_bytes=len(data or b""))
        if data is None:
            raise MissingFileError(f"{path} does not exist")
        return data

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` from a file, starting at byte `begin`."""
        data = self.files.data.get(path)
        self._count(reads=1, read_bytes=len(buffer))
        if data is None:
            raise MissingFileError(f"{path} does not exist")
        if len(part := data[begin : begin + len(buffer)]) != len(buffer):
            raise StorageError(f"{path} ends too early")
        buffer[:] = part

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file."""
        data = b"".join(chunks)
        self._count(writes=1, written_bytes=len(data))
        with self.files.lock:
            self.files.data[path] = data

    def create(self, path: str, data: bytes) -> bool:
        """Create a file. Return False if it already exists."""
        self._count(writes=1, written_bytes=len(data))
        with self.files.lock:
            return self.files.data.setdefault(path, data) is data

    def staging(self, target: str) -> str:
        """Return the target itself, as object stores cannot rename."""
        return target

    def commit(self, source: str, target: str) -> None:
        """Check that the folder exists."""
        if source != target:
            raise StorageError("the simulated storage cannot rename")
        if not self.list_names(f"{source}/"):
            raise MissingFileError(f"{source} has no files")

    def delete(self, path: str) -> None:
        """Delete a file or folder."""
        paths = [f.path for f in self.list(f"{path}/")]
        self._count(writes=(f"{path}/{MARKER}" in paths) + -(-len(paths) // LISTED))
        with self.files.lock:
            for name in (path, *paths):
                self.files.data.pop(name, None)

    def directory(self) -> Path:
        """Raise `StorageError`, because the files are in memory."""
        raise StorageError("the simulated storage has no directory")

    def _count(self, *, reads: int = 0, writes: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> None:
        with self.files.lock:
            self.use.reads += reads
            self.use.writes += writes
            self.use.read_bytes += read_bytes
            self.use.written_bytes += written_bytes
