"""Runs at a URI: upload the working copy to storage at each checkpoint and at the end."""

from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint import open_storage
from axlearn_core.errors import StorageError
from axlearn_core.run.events import RunListener
from axlearn_core.run.notices import log_message
from axlearn_core.run.working_copy import fetch_files, local_files, working_copy


class RunMirror:
    """The files of a run at a URI, and their local working copy. The storage is the source of truth.

    Attributes:
        uri: URI of the run, without a trailing `/`.
        path: Path of the working copy.
        storage: Storage at the URI.
    """

    def __init__(self, uri: str, path: Path | None = None):
        self.uri = uri.rstrip("/")
        self.path = path or working_copy(self.uri)
        self.storage = open_storage(self.uri)
        self._pushed: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Download changes, so that the working copy matches the run at the URI. See `fetch_files`."""
        names = fetch_files(self.storage, self.uri, self.path)
        self._pushed = {name: self._state(name) for name in names}

    def push(self) -> None:
        """Copy changed files to the storage. Log a failure; the next push retries."""
        try:
            for name in sorted(local_files(self.path)):
                state = self._state(name)
                if self._pushed.get(name) != state:
                    self.storage.write(name, [(self.path / name).read_bytes()])
                    self._pushed[name] = state
        except (StorageError, OSError) as error:
            log_message(f"note: cannot update {self.uri}: {error}\n    its files are in {self.path}")

    def _state(self, name: str) -> tuple[int, int]:
        status = (self.path / name).stat()
        return status.st_size, status.st_mtime_ns


class MirrorListener(RunListener):
    """Uploads the working copy of a run to its URI. Runs on process 0.

    It is closed after the other listeners, so that files that they write at the end are also copied.
    """

    position = "first"
    errors_name_plugin = False

    def __init__(self, session: Any):
        self.session = session
        self.mirror = RunMirror(session.uri, session.path)
        self._is_fetched = False

    def opened(self, run: Any) -> None:
        """Fetch the working copy."""
        if jax.process_index() == 0:
            self.mirror.fetch()
            self._is_fetched = True

    def push(self) -> None:
        """Copy changed files to the storage."""
        if self._is_fetched:
            self.mirror.push()

    def saving(self, step: int) -> None:
        """Record the first checkpoint in the lock, then copy changed files to the storage."""
        self.session.record_checkpoint()
        self.push()

    def closed(self) -> None:
        """Copy changed files to the storage."""
        self.push()


def mirror(session: Any) -> MirrorListener | None:
    """Return the listener for a run, or None if the run is in a local directory."""
    return None if session.uri is None else MirrorListener(session)
