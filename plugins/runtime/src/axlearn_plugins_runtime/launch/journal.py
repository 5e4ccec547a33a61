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


class Journal:
    """Appends events: `time, attempt, rank, host, pid, event, reason`.

    If the storage cannot append, each event rewrites the file.

    Args:
        storage: Storage of the run directory.
        now: Returns the current time, for tests.
    """

    def __init__(self, storage: Storage, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self.storage, self._now = storage, now
        self._text: bytes | None = None

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
                self.storage.write(PROCESSES, [self._read_records()])
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
        """Write an event and return it."""
        record = {
            "time": self._now().isoformat(timespec="milliseconds"),
            "attempt": attempt,
            "rank": rank,
            "host": host,
            "pid": pid,
            "event": event,
            "reason": reason,
        }
        line = json.dumps(record).encode() + b"\n"
        if isinstance(self.storage, LocalStorage):
            root = Path(self.storage.root)
            root.mkdir(parents=True, exist_ok=True)
            with (root / PROCESSES).open("ab") as file:
                file.write(line)
        else:
            if self._text is None:
                self._text = self._read_records()
            self._text += line
            self.storage.write(PROCESSES, [self._text])
        return record

    def attempts(self) -> int:
        """Return the number of the last attempt in the file, or 0."""
        numbers = [0]
        for line in self._read_records().splitlines():
            try:
                numbers.append(int(json.loads(line)["attempt"]))
            except (ValueError, KeyError, TypeError):
                continue  # a line cut off by a kill
        return max(numbers)

    def _read_records(self) -> bytes:
        try:
            return self.storage.read(PROCESSES)
        except MissingFileError:
            return b""
