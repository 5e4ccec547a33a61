"""Where the time of a run goes: seconds by phase, kept in `<run>/phases.jsonl`."""

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PHASES = "phases.jsonl"
WRITE_EVERY = 5.0
"""Seconds between records, besides those of events."""


class PhaseClock:
    """Adds up the seconds of each phase of one attempt at a run.

    A record is an object on a line: `attempt` (when it began, which names it), `time`, `event` (`start`, `run`, `end`), `step`
    (steps finished), `seconds` (phase -> so far), `host`, `pid`.

    Attributes:
        seconds: phase -> seconds of those that ended.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.seconds: dict[str, float] = {}
        self._now = now
        self._phase, self._since = "start", now()
        self._attempt = _timestamp()
        self._file: Path | None = None
        self._written = self._since

    def begin(self, phase: str, count_as: str | None = None) -> None:
        """A phase begins, and the one before it ends.

        Args:
            phase: `restore`, `compile`, `input`, `step`, `evaluate`, `save`.
            count_as: the phase that the ended time is added to, where it is not the one that ended.
        """
        now = self._now()
        ended = count_as or self._phase
        self.seconds[ended] = self.seconds.get(ended, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def open(self, run_dir: Path, step: int) -> None:
        """From here on the attempt is recorded in a run directory that exists."""
        self._file = run_dir / PHASES
        self.write("start", step)

    def record(self, step: int) -> None:
        """Writes a record where the last one is `WRITE_EVERY` seconds old."""
        if self._now() - self._written >= WRITE_EVERY:
            self.write("run", step)

    def write(self, event: str, step: int) -> None:
        """Writes a record."""
        if self._file is None:
            return
        self.begin(self._phase)
        record: dict[str, Any] = {"attempt": self._attempt, "time": _timestamp(), "event": event, "step": step}
        record["seconds"] = {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}
        record |= {"host": socket.gethostname(), "pid": os.getpid()}
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._written = self._now()


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
