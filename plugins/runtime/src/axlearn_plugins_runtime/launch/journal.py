"""`processes.jsonl` of a run: one line for each start, death and replacement of a process."""

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

    On a storage that cannot append, the file is written whole at each event.

    Args:
        storage: of the run directory.
        now: the time, for tests.
    """

    def __init__(self, storage: Storage, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self.storage, self._now = storage, now
        self._text: bytes | None = None

    def check(self) -> None:
        """Writes no event, but what there is.

        Raises:
            RequestError: nothing can be written there.
        """
        try:
            if isinstance(self.storage, LocalStorage):
                root = Path(self.storage.root)
                root.mkdir(parents=True, exist_ok=True)
                with (root / PROCESSES).open("ab"):
                    pass
            else:
                self.storage.write(PROCESSES, [self._earlier()])
        except (OSError, StorageError) as error:
            raise RequestError(
                f"--run-dir: the run cannot be launched there: {PROCESSES} cannot be written: {reason(error)}\n"
                "    fix: make it reachable and writable, or give another --run-dir"
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
        """Writes one event, and returns it."""
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
                self._text = self._earlier()
            self._text += line
            self.storage.write(PROCESSES, [self._text])
        return record

    def attempts(self) -> int:
        """The number of the last attempt that the file tells of; 0 for none."""
        numbers = [0]
        for line in self._earlier().splitlines():
            try:
                numbers.append(int(json.loads(line)["attempt"]))
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill tore
        return max(numbers)

    def _earlier(self) -> bytes:
        try:
            return self.storage.read(PROCESSES)
        except MissingFileError:
            return b""
