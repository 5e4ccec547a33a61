"""A file that shows a supervisor what a process does. Imports no JAX."""

import os
import time
from pathlib import Path

PROGRESS = "AXLEARN_PROGRESS"
"""Environment variable: a local file that shows a supervisor the current phase, and since when."""


class Progress:
    """One line in a file, overwritten at each phase: seconds of the machine's monotonic clock, steps finished, phase.

    A write costs microseconds and no more than a line, so that a probe can look as often as it likes.
    """

    SIZE = 64

    def __init__(self, path: str | os.PathLike[str]):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @classmethod
    def of_environment(cls) -> "Progress | None":
        """Opens the file that `AXLEARN_PROGRESS` names. None if the variable is not set, or the file cannot be written."""
        path = os.environ.get(PROGRESS)
        try:
            return cls(path) if path else None
        except OSError:
            return None

    def write(self, phase: str, step: int) -> None:
        """Writes the phase that begins now."""
        line = f"{time.monotonic():.3f} {step} {phase}".encode()[: self.SIZE - 1]
        try:
            os.pwrite(self._descriptor, line.ljust(self.SIZE - 1) + b"\n", 0)
        except OSError:  # a full disk must not end the run
            return

    @staticmethod
    def read(path: str | os.PathLike[str]) -> tuple[float, int, str] | None:
        """(time by the monotonic clock, steps finished, phase); None if nothing was written yet."""
        try:
            since, step, phase = Path(path).read_text().split()
            return float(since), int(step), phase
        except (OSError, ValueError):
            return None
