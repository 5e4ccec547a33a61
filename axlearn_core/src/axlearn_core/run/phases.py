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
"""Seconds between records, in addition to those of events."""
PROGRESS = "AXLEARN_PROGRESS"
"""Environment variable: a file of this machine in which a supervisor sees what the process does, and since when."""


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
        self._progress = Progress.of_environment()
        self._step = 0
        self._lock = threading.Lock()

    def begin(self, phase: str, count_as: str | None = None, *, step: int | None = None) -> None:
        """A phase begins, and the one before it ends.

        Args:
            phase: `restore`, `compile`, `input`, `step`, `evaluate`, `save`.
            count_as: the phase that the ended time is added to, where it is not the one that ended.
            step: steps finished, where that changed.
        """
        with self._lock:
            self._step = self._step if step is None else step
            if self._progress is not None:
                self._progress.write(phase, self._step)
            self._add_up(count_as)
            self._phase = phase

    def open(self, run_dir: Path, step: int) -> None:
        """From here on the attempt is recorded in a run directory that exists."""
        self._file = run_dir / PHASES
        self.write("start", step)

    def record(self, step: int) -> None:
        """Writes a record where the last one is `WRITE_EVERY` seconds old."""
        self._step = step
        if self._now() - self._written >= WRITE_EVERY:
            self.write("run", step)

    def write(self, event: str, step: int | None = None, **facts: object) -> None:
        """Writes a record; `step` is the newest by default, and `facts` are added."""
        with self._lock:
            self._step = self._step if step is None else step
            if self._file is None:
                return
            self._add_up()
            record: dict[str, Any] = {
                "attempt": self._attempt,
                "time": _timestamp(),
                "event": event,
                "step": self._step,
            }
            record["seconds"] = {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}
            record |= {"host": socket.gethostname(), "pid": os.getpid(), **facts}
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self._written = self._now()

    def checkpoint(self, step: int, reason: str | None) -> None:
        """Records how a save ended; see `axlearn_core.contracts.capabilities.ReportsSaves`."""
        with contextlib.suppress(OSError):  # a full disk fails the save already, which training may survive
            if reason is None:
                self.write("saved", checkpoint=step)
            else:
                self.write("save-failed", checkpoint=step, reason=reason)

    def _add_up(self, count_as: str | None = None) -> None:
        """Adds the time since the last call to a phase: the current one, or `count_as`. Called with the lock held."""
        now = self._now()
        phase = count_as or self._phase
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class Progress:
    """One line in a file, overwritten at each phase: seconds of the machine's monotonic clock, steps finished, phase.

    A write costs microseconds and no more than a line, so that a probe can look as often as it likes.
    """

    SIZE = 64

    def __init__(self, path: str | os.PathLike[str]):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @classmethod
    def of_environment(cls) -> "Progress | None":
        """That of the file which `AXLEARN_PROGRESS` names; None where nobody watches, or the file cannot be written."""
        path = os.environ.get(PROGRESS)
        try:
            return cls(path) if path else None
        except OSError:
            return None

    def write(self, phase: str, step: int) -> None:
        """What begins now."""
        line = f"{time.monotonic():.3f} {step} {phase}".encode()[: self.SIZE - 1]
        try:
            os.pwrite(self._descriptor, line.ljust(self.SIZE - 1) + b"\n", 0)
        except OSError:  # a full disk must not end the run
            return

    @staticmethod
    def read(path: str | os.PathLike[str]) -> tuple[float, int, str] | None:
        """(when by the monotonic clock, steps finished, phase); None where nothing was written yet."""
        try:
            since, step, phase = Path(path).read_text().split()
            return float(since), int(step), phase
        except (OSError, ValueError):
            return None


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
