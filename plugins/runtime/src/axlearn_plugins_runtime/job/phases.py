"""The time that a run spends in each phase, recorded in `<run>/phases.jsonl`."""

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
"""Seconds between periodic records. Events are recorded immediately."""


class PhaseClock:
    """Adds up the seconds spent in each phase during one attempt of a run.

    Each line of the file is a record, a JSON object: `attempt` (its start time, which identifies it), `time`, `event` (`start`,
    `run`, `end`, `saved` or `save-failed`), `step` (finished steps), `seconds` (total of each phase so far), `host` and `pid`.
    The events `saved` and `save-failed` also have `checkpoint` (the step of the checkpoint), and `save-failed` has a `reason`.
    Checkpoints finish in other threads, so a lock guards the state.

    Args:
        now: Returns the current time in seconds.
        start_time: Start of the attempt on the clock of `now`, or None for the current time.

    Attributes:
        seconds: Seconds spent in each phase, up to the last update.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, start_time: float | None = None):
        self.seconds: dict[str, float] = {}
        self._now = now
        self._phase, self._phase_start = "start", now() if start_time is None else start_time
        self._attempt = _timestamp(now() - self._phase_start)
        self._file: Path | None = None
        self._written = self._phase_start
        self._progress = Progress.from_environment()
        self._step = 0
        self._lock = threading.Lock()

    def begin(self, phase: str, count_as: str | None = None, *, step: int | None = None) -> None:
        """Begin a phase and end the previous one.

        Args:
            phase: `restore`, `compile`, `input`, `rollout`, `step`, `evaluate` or `save`.
            count_as: Phase that the time since the last call counts toward (default: the previous phase).
            step: Number of finished steps, if it changed.
        """
        with self._lock:
            self._step = self._step if step is None else step
            if self._progress is not None:
                self._progress.write(phase, self._step)
            self._add_up(count_as)
            self._phase = phase

    def open(self, run_dir: Path, step: int) -> None:
        """Start recording the attempt in an existing run directory."""
        self._file = run_dir / PHASES
        self.write("start", step)

    def record(self, step: int) -> None:
        """Write a record if the last one is at least `WRITE_EVERY` seconds old."""
        self._step = step
        if self._now() - self._written >= WRITE_EVERY:
            self.write("run", step)

    def write(self, event: str, step: int | None = None, **facts: object) -> None:
        """Write a record with additional `facts`. The default `step` is the newest."""
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
        """Record the result of a save. See `axlearn_core.contracts.capabilities.ReportsSaves`."""
        with contextlib.suppress(OSError):  # the save has failed because the disk is full; training may continue
            if reason is None:
                self.write("saved", checkpoint=step)
            else:
                self.write("save-failed", checkpoint=step, reason=reason)

    def _add_up(self, count_as: str | None = None) -> None:
        """Add the time since the last call to `count_as` or the current phase. The caller must hold the lock."""
        now = self._now()
        phase = count_as or self._phase
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._phase_start
        self._phase_start = now


class ClockListener(RunListener):
    """Sums the time of each phase. Process 0 records it.

    It is closed before the other listeners, so that their closing time is not counted.

    Args:
        start_time: Start of the attempt, in seconds of the monotonic clock.
    """

    position = "last"
    errors_name_plugin = False

    def __init__(self, start_time: float | None = None) -> None:
        self.clock = PhaseClock(start_time=start_time)
        self._run: Any = None

    def restored(self, run: Any) -> None:
        """Start recording in the run directory."""
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
        """Record the end of the attempt."""
        if self._run is not None:
            self.clock.write("end", self._run.step)


def phase_clock(session: Any) -> ClockListener:
    """Return the listener for a run."""
    return ClockListener(session.start_time)


def _timestamp(age: float = 0.0) -> str:
    """Return the UTC time `age` seconds ago in ISO 8601."""
    return (datetime.now(UTC) - timedelta(seconds=age)).isoformat(timespec="milliseconds")
