"""The time of a run by phase, in seconds, kept in `<run>/phases.jsonl`."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax

from axlearn_core.run.events import RunListener
from axlearn_core.run.metric_files import PHASES
from axlearn_plugins_runtime.job.progress import Progress

WRITE_EVERY = 5.0
"""Seconds between records, in addition to those of events."""


class PhaseClock:
    """Adds up the seconds of each phase of one attempt at a run.

    A record is an object on a line: `attempt` (when it began, which names it), `time`, `event` (`start`, `run`, `end`, and of
    checkpoints `saved`, `save-failed`), `step` (steps finished), `seconds` (phase -> so far), `host`, `pid`. Records of
    checkpoints have `checkpoint` (its step), and `reason` if it failed. Checkpoints end in threads of their own, so a lock
    guards the rest.

    Args:
        now: the current time in seconds.
        since: when the attempt began, by `now`; None means now.

    Attributes:
        seconds: phase -> seconds of those that ended.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, since: float | None = None):
        self.seconds: dict[str, float] = {}
        self._now = now
        self._phase, self._since = "start", now() if since is None else since
        self._attempt = _timestamp(now() - self._since)
        self._file: Path | None = None
        self._written = self._since
        self._progress = Progress.of_environment()
        self._step = 0
        self._lock = threading.Lock()

    def begin(self, phase: str, count_as: str | None = None, *, step: int | None = None) -> None:
        """A phase begins, and the one before it ends.

        Args:
            phase: `restore`, `compile`, `input`, `step`, `evaluate`, `save`.
            count_as: the phase that gets the time since the last call, if it is not the one that ended.
            step: steps finished, if that changed.
        """
        with self._lock:
            self._step = self._step if step is None else step
            if self._progress is not None:
                self._progress.write(phase, self._step)
            self._add_up(count_as)
            self._phase = phase

    def open(self, run_dir: Path, step: int) -> None:
        """Begins to record the attempt in a run directory, which exists."""
        self._file = run_dir / PHASES
        self.write("start", step)

    def record(self, step: int) -> None:
        """Writes a record if the last one is `WRITE_EVERY` seconds old."""
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


class ClockListener(RunListener):
    """Adds up the time of each phase, and records it from the first process.

    It is closed before the other listeners, so that the time that they take to close is not counted.

    Args:
        since: when the attempt began, in seconds of the monotonic clock.
    """

    position = "last"
    errors_name_plugin = False

    def __init__(self, since: float | None = None) -> None:
        self.clock = PhaseClock(since=since)
        self._run: Any = None

    def restored(self, run: Any) -> None:
        """Opens the record in the run directory."""
        self._run = run
        if jax.process_index() == 0:
            self.clock.open(run.path, run.step)

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """See `PhaseClock.begin`."""
        self.clock.begin(name, count_as, step=step)
        self.clock.record(step)

    def saved(self, step: int, reason: str | None) -> None:
        """See `PhaseClock.checkpoint`."""
        self.clock.checkpoint(step, reason)

    def closed(self) -> None:
        """Records the end of the attempt."""
        if self._run is not None:
            self.clock.write("end", self._run.step)


def phase_clock(session: Any) -> ClockListener:
    """The listener of a run."""
    return ClockListener(session.since)


def _timestamp(age: float = 0.0) -> str:
    """The time `age` seconds ago."""
    return (datetime.now(UTC) - timedelta(seconds=age)).isoformat(timespec="milliseconds")
