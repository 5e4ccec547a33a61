"""Where the time of a run goes: seconds by phase, kept in `<run>/phases.jsonl`."""

import contextlib
import json
import os
import socket
import threading
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

    A record is an object on a line: `attempt` (when it began, which names it), `time`, `event` (`start`, `run`, `end`, and of
    checkpoints `saved`, `save-failed`), `step` (steps finished), `seconds` (phase -> so far), `host`, `pid`. Records of
    checkpoints have `checkpoint` (its step), and `reason` where it failed. Checkpoints end in threads of their own, so a lock
    guards the rest.

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
        self._step = 0
        self._lock = threading.RLock()

    def begin(self, phase: str, count_as: str | None = None) -> None:
        """A phase begins, and the one before it ends.

        Args:
            phase: `restore`, `compile`, `input`, `step`, `evaluate`, `save`.
            count_as: the phase that the ended time is added to, where it is not the one that ended.
        """
        with self._lock:
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
        self._step = max(self._step, step)
        if self._now() - self._written >= WRITE_EVERY:
            self.write("run", step)

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Writes a record; `facts` are added to it."""
        with self._lock:
            self._step = max(self._step, step)
            if self._file is None:
                return
            self.begin(self._phase)
            record: dict[str, Any] = {"attempt": self._attempt, "time": _timestamp(), "event": event, "step": step}
            record["seconds"] = {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}
            record |= {"host": socket.gethostname(), "pid": os.getpid(), **facts}
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self._written = self._now()

    def checkpoint(self, step: int, reason: str | None) -> None:
        """Records how a save ended; see `axlearn_core.contracts.capabilities.ReportsSaves`."""
        with contextlib.suppress(OSError):  # a full disk fails the save already, which training may survive
            if reason is None:
                self.write("saved", self._step, checkpoint=step)
            else:
                self.write("save-failed", self._step, checkpoint=step, reason=reason)


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
