"""Storage for `sqlite://` URIs.

It packs many small files into one, for file systems that limit the number of files.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from axlearn_core.extend import MissingFileError, StorageError, StoredFile

SCHEMA = "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, data BLOB NOT NULL)"
BELOW = "substr(path, 1, length(?1) + 1) = ?1 || '/'"


class SqliteStorage:
    """Files in a SQLite database. Implements `axlearn_core.contracts.storage.Storage`.

    A file can have at most 1 GB.
    """

    def __init__(self, file: Path):
        self.file = file

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder."""
        rest = (file.path.removeprefix(folder) for file in self.list(folder))
        return sorted({path.partition("/")[0] for path in rest})

    def list(self, prefix: str = "") -> list[StoredFile]:
        """Return all files whose path begins with `prefix`."""
        files = (StoredFile(*row) for row in self._run("SELECT path, length(data) FROM files ORDER BY path"))
        return [file for file in files if file.path.startswith(prefix)]

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return self._read("SELECT data FROM files WHERE path = ?1", path)

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file, from byte `begin`."""
        data = self._read("SELECT substr(data, ?2, ?3) FROM files WHERE path = ?1", path, begin + 1, len(buffer))
        if len(data) != len(buffer):
            raise StorageError(f"{path} in {self.file} is too short: {begin + len(data)} bytes")
        buffer[:] = data

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file in one transaction."""
        self._run("INSERT OR REPLACE INTO files VALUES (?, ?)", path, b"".join(chunks))

    def create(self, path: str, data: bytes) -> bool:
        """Create a file. Return False if it already exists."""
        return bool(self._run("INSERT OR IGNORE INTO files VALUES (?, ?) RETURNING path", path, data))

    def staging(self, target: str) -> str:
        """Return a temporary folder next to the target. One transaction renames it."""
        return f"{target}.partial"

    def commit(self, source: str, target: str) -> None:
        """Rename all files of a folder in one transaction."""
        if self.list(f"{target}/"):
            raise StorageError(f"{target} in {self.file} already exists")
        rename = f"UPDATE files SET path = ?2 || substr(path, length(?1) + 1) WHERE {BELOW} RETURNING path"
        if not self._run(rename, source, target):
            raise MissingFileError(f"{self.file} has no folder {source}")

    def delete(self, path: str) -> None:
        """Delete a file or folder."""
        self._run(f"DELETE FROM files WHERE path = ?1 OR {BELOW}", path)

    def directory(self) -> Path:
        """Raise `StorageError`, because a database is not a directory."""
        raise StorageError(f"{self.file} is a database, not a directory")

    def _read(self, query: str, path: str, *values: int) -> bytes:
        if not (rows := self._run(query, path, *values)):
            raise MissingFileError(f"{self.file} has no file {path}")
        return rows[0][0]

    def _run(self, query: str, *values: Any) -> Any:
        """Run a query in one transaction and return its rows. Roll back if it fails."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file)) as database, database:
                database.execute(SCHEMA)
                return database.execute(query, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"{self.file}: {error}") from error
