"""Storage on top of an object store. Transient errors are retried, and a marker object commits a folder."""

import builtins
import logging
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TypeVar

from axlearn_core.contracts.storage import JOINED_BYTES, MARKER, StoredFile
from axlearn_core.errors import MissingFileError, StorageError
from axlearn_plugins_cloud.objects import MissingObjectError, Objects, RefusedError, TransientError

log = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 10
RETRIES, EARNED = 200, 10
"""Number of retries that a process may make in total, and number of successful requests that allow one more.

The retries in a job are therefore at most a tenth of its requests, plus a constant for each process."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 20.0
"""Seconds between attempts. The pause doubles each time, with random jitter, so that processes do not retry in lockstep."""


class ObjectStorage:
    """Storage in the objects under a prefix in a bucket; see `axlearn_core.contracts.storage.Storage`.

    A file is kept in memory while it is written; the checkpointer's files are 64 MiB. Since a folder cannot be renamed, it is
    written directly to its final location. It is complete when its `MARKER` exists.

    Attributes:
        objects: Client for the bucket.
        uri: URI of the storage, for use in messages.
        prefix: Prefix of all keys, without surrounding slashes.
        joined_bytes: See `axlearn_core.contracts.storage.JoinsReads`.
    """

    joined_bytes = JOINED_BYTES

    def __init__(self, objects: Objects, uri: str, prefix: str):
        self.objects, self.uri, self.prefix = objects, uri.rstrip("/"), prefix
        self._retries = _Retries()

    def list(self, prefix: str = "") -> builtins.list[StoredFile]:
        """Return all files whose path starts with `prefix`."""
        root = self._key("")
        objects = self._attempt(f"{self.uri}/{prefix}", lambda: builtins.list(self.objects.list(root + prefix)))
        return sorted(StoredFile(key.removeprefix(root), size) for key, size in objects if not key.endswith("/"))

    def list_names(self, folder: str = "") -> builtins.list[str]:
        """Return the names of the files and folders directly in a folder."""
        key = self._key(folder)
        key = key if not key or key.endswith("/") else f"{key}/"
        names = self._attempt(f"{self.uri}/{folder}", lambda: builtins.list(self.objects.list_names(key)))
        return sorted({name for name in names if name})

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return self._attempt(f"{self.uri}/{path}", lambda: self.objects.get(self._key(path)))

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes, starting at `begin`."""
        if not buffer:
            self.read(path)
            return
        name = f"{self.uri}/{path}"
        data = self._attempt(name, lambda: self.objects.get_range(self._key(path), begin, len(buffer)))
        if len(data) != len(buffer):
            raise StorageError(f"{name} ends too early: {begin + len(data)} bytes, expected {begin + len(buffer)}")
        buffer[:] = data

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file in one call."""
        data = b"".join(chunks)
        self._attempt(f"{self.uri}/{path}", lambda: self.objects.put(self._key(path), data))

    def create(self, path: str, data: bytes) -> bool:
        """Create a file atomically. Return False if it already exists."""
        key, attempts = self._key(path), 0

        def create() -> bool:
            nonlocal attempts
            attempts += 1
            # An earlier attempt may have succeeded even though its response was lost.
            return self.objects.put_new(key, data) or (attempts > 1 and self.objects.get(key) == data)

        return self._attempt(f"{self.uri}/{path}", create)

    def staging(self, target: str) -> str:
        """Return the target itself; `MARKER` shows when it is complete."""
        return target

    def commit(self, source: str, target: str) -> None:
        """Commit a folder. If `source` differs from `target`, copy it within the store, `MARKER` last, then delete it."""
        if not self.list_names(f"{source}/"):
            raise MissingFileError(f"{self.uri}/{source} has no files")
        if source == target:
            return
        if self.list_names(f"{target}/"):
            raise StorageError(f"{self.uri}/{target} already exists")
        files = self.list(f"{source}/")
        names = [f.path.removeprefix(f"{source}/") for f in files]

        def copy(name: str) -> None:
            begin, end = self._key(f"{source}/{name}"), self._key(f"{target}/{name}")
            self._attempt(f"{self.uri}/{target}/{name}", lambda: self.objects.copy(begin, end))

        with ThreadPoolExecutor(8) as pool:
            builtins.list(pool.map(copy, (n for n in names if n != MARKER)))
        if MARKER in names:
            copy(MARKER)
        self.delete(source)

    def delete(self, path: str) -> None:
        """Delete a file or folder, its `MARKER` first."""
        folder = f"{path}/"
        files = [f.path for f in self.list(folder)]
        if f"{folder}{MARKER}" in files:
            self._delete([f"{folder}{MARKER}"])
        self._delete([p for p in (path, *files) if p != f"{folder}{MARKER}"])

    def directory(self) -> Path:
        """Raise `StorageError`, because objects have no directory."""
        raise StorageError(
            f"{self.uri} is not a directory\n"
            "    fix: copy it to a local directory with `aws s3 sync` or `gcloud storage rsync`; checkpoints of earlier "
            "versions are read from such a copy"
        )

    def _delete(self, paths: builtins.list[str]) -> None:
        def delete(begin: int) -> None:
            keys = [self._key(p) for p in paths[begin : begin + self.objects.batch]]
            self._attempt(f"{self.uri}/{paths[begin]}", lambda: self.objects.delete(keys))

        with ThreadPoolExecutor(8) as pool:
            builtins.list(pool.map(delete, range(0, len(paths), self.objects.batch)))

    def _key(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise StorageError(f"{path!r} is not a path below {self.uri}")
        return f"{self.prefix}/{path}" if self.prefix else path

    def _attempt(self, name: str, call: Callable[[], T]) -> T:
        """Call a function, and retry it while its errors are transient.

        Raises:
            MissingFileError: If the object does not exist.
            StorageError: If the store refuses the call, or all attempts fail.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = call()
                self._retries.earn()
                return result
            except MissingObjectError:
                raise MissingFileError(f"{name} does not exist") from None
            except RefusedError as error:
                raise StorageError(f"{name}: {error} ({error.fix})") from error
            except TransientError as error:
                if attempt == ATTEMPTS:
                    raise StorageError(
                        f"{name}: {error} ({ATTEMPTS} attempts; the store may be down or the endpoint wrong)"
                    ) from error
                if not self._retries.take():
                    raise StorageError(
                        f"{name}: {error} (not retried: {RETRIES} of this process's requests were retried, which is the limit; "
                        "the store may be overloaded)"
                    ) from error
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * (0.5 + random.random() / 2)
                level = logging.WARNING if attempt >= 4 else logging.INFO
                log.log(
                    level, "%s: %s; retrying (attempt %d of %d) in %.1f s", name, error, attempt + 1, ATTEMPTS, pause
                )
                time.sleep(pause)
        raise AssertionError


class _Retries:
    """Counts the retries that all threads of a storage may still make."""

    def __init__(self) -> None:
        self._left, self._successes = RETRIES, 0
        self._lock = Lock()

    def take(self) -> bool:
        """Use a retry. Return False if none is left."""
        with self._lock:
            if self._left == 0:
                return False
            self._left -= 1
            return True

    def earn(self) -> None:
        """Count a successful request."""
        with self._lock:
            self._successes += 1
            if self._successes % EARNED == 0:
                self._left = min(RETRIES, self._left + 1)
