"""The storage of `sqlite://` URIs: many small files in one, for file systems that limit the number of files."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from axlearn_core.contracts.storage import StoredFile
from axlearn_core.errors import MissingFileError, StorageError

SCHEMA = "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, data BLOB NOT NULL)"


class SqliteStorage:
    """The files in a database; see `axlearn_core.contracts.storage.Storage`. A file is at most 1 GB."""

    def __init__(self, file: Path):
        self.file = file

    def list(self, prefix: str = "") -> list[StoredFile]:
        """All files whose path begins with `prefix`."""
        query = "SELECT path, length(data) FROM files WHERE substr(path, 1, ?) = ? ORDER BY path"
        with self._open() as database:
            return sorted(StoredFile(path, size) for path, size in database.execute(query, (len(prefix), prefix)))

    def read(self, path: str) -> bytes:
        """A whole file."""
        with self._open() as database:
            row = database.execute("SELECT data FROM files WHERE path = ?", (path,)).fetchone()
        if row is None:
            raise MissingFileError(f"{self.file} has no file {path}")
        return row[0]

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fills `buffer` with the file from byte `begin` on."""
        query = "SELECT substr(data, ?, ?) FROM files WHERE path = ?"
        with self._open() as database:
            row = database.execute(query, (begin + 1, len(buffer), path)).fetchone()
        if row is None:
            raise MissingFileError(f"{self.file} has no file {path}")
        if len(row[0]) != len(buffer):
            raise StorageError(f"{path} in {self.file} ends too early: {begin + len(row[0])} bytes")
        buffer[:] = row[0]

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes a file in one transaction."""
        data = b"".join(chunks)
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?)", (path, data))

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file where there is none."""
        with self._open() as database:
            return database.execute("INSERT OR IGNORE INTO files VALUES (?, ?)", (path, data)).rowcount == 1

    def staging(self, target: str) -> str:
        """A folder beside the target: one transaction renames it."""
        return f"{target}.partial"

    def commit(self, source: str, target: str) -> None:
        """Renames all files of a folder in one transaction."""
        rename = "UPDATE files SET path = ? || substr(path, ?) WHERE substr(path, 1, ?) = ?"
        if self.list(f"{target}/"):
            raise StorageError(f"{target} in {self.file} exists already")
        with self._open() as database:
            count = database.execute(rename, (target, len(source) + 1, len(source) + 1, f"{source}/")).rowcount
        if not count:
            raise MissingFileError(f"{self.file} has no folder {source}")

    def delete(self, path: str) -> None:
        """Deletes a file or folder."""
        with self._open() as database:
            database.execute(
                "DELETE FROM files WHERE path = ? OR substr(path, 1, ?) = ?", (path, len(path) + 1, f"{path}/")
            )

    def directory(self) -> Path:
        """Raises `StorageError`: a database is not a directory."""
        raise StorageError(f"{self.file} is a database, not a directory: checkpoints cannot be written there")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction, undone where it fails."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file)) as database, database:
                database.execute(SCHEMA)
                yield database
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{self.file}: {error}") from error
