"""The file `processes.jsonl` of a run: starts, deaths and replacements of processes."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import MissingFileError, RequestError, StorageError, reason

PROCESSES = "processes.jsonl"
EVENTS = (
    "started", "exited", "frozen", "lost", "killed", "replaced", "set-aside", "reduced", "stepping", "finished", "stopped",
)  # fmt: skip


OLDER = "processes.1.jsonl"
"""Name of the file after it has reached `MAX_BYTES`. It replaces an earlier one."""
MAX_BYTES = 64 * 2**20
REWRITE_SECONDS = 10.0
"""Seconds between writes to a storage that cannot append, because each of them writes the whole file."""


class Journal:
    """Appends events: `time, attempt, rank, host, pid, event, reason`. `flush` writes them.

    Args:
        storage: Storage of the run directory.
        now: Returns the current time, for tests.
    """

    def __init__(self, storage: Storage, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self.storage, self._now = storage, now
        self._text: bytes | None = None
        self._lines: list[bytes] = []
        self._rewritten: datetime | None = None

    def check(self) -> None:
        """Check that the file is writable, without adding an event.

        Raises:
            RequestError: The file cannot be written.
        """
        try:
            if isinstance(self.storage, LocalStorage):
                root = Path(self.storage.root)
                root.mkdir(parents=True, exist_ok=True)
                with (root / PROCESSES).open("ab"):
                    pass
            else:
                self.storage.write(PROCESSES, [self._read_records(PROCESSES)])
        except (OSError, StorageError) as error:
            raise RequestError(
                f"--run-dir: cannot launch the run: {PROCESSES} cannot be written: {reason(error)}\n"
                "    fix: make it reachable and writable, or use another --run-dir"
            ) from error

    def write(
        self,
        event: str,
        *,
        attempt: int,
        rank: int | None = None,
        host: str = "",
        pid: int | None = None,
        reason: str = "",
    ) -> dict[str, Any]:
        """Add an event and return it."""
        record = {
            "time": self._now().isoformat(timespec="milliseconds"),
            "attempt": attempt,
            "rank": rank,
            "host": host,
            "pid": pid,
            "event": event,
            "reason": reason,
        }
        self._lines.append(json.dumps(record).encode() + b"\n")
        return record

    def flush(self, *, now: bool = True) -> None:
        """Write the events since the last call.

        Args:
            now: False may keep them for up to `REWRITE_SECONDS` if the storage cannot append.
        """
        if not self._lines:
            return
        if isinstance(self.storage, LocalStorage):
            self._append(Path(self.storage.root))
        elif now or self._rewritten is None or (self._now() - self._rewritten).total_seconds() >= REWRITE_SECONDS:
            self._rewrite()

    def _append(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        path = root / PROCESSES
        if path.exists() and path.stat().st_size >= MAX_BYTES:
            path.replace(root / OLDER)
        lines, self._lines = self._lines, []
        with path.open("ab") as file:
            file.write(b"".join(lines))

    def _rewrite(self) -> None:
        if self._text is None:
            self._text = self._read_records(PROCESSES)
        if len(self._text) >= MAX_BYTES:
            self.storage.write(OLDER, [self._text])
            self._text = b""
        lines, self._lines = self._lines, []
        self._text += b"".join(lines)
        self.storage.write(PROCESSES, [self._text])
        self._rewritten = self._now()

    def attempts(self) -> int:
        """Return the number of the last attempt, or 0."""
        return max(_last_attempt(self._read_records(name)) for name in (PROCESSES, OLDER))

    def _read_records(self, name: str) -> bytes:
        try:
            return self.storage.read(name)
        except MissingFileError:
            return b""


def _last_attempt(text: bytes) -> int:
    numbers = [0]
    for line in text.splitlines():
        try:
            numbers.append(int(json.loads(line)["attempt"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line cut off by a kill
    return max(numbers)
