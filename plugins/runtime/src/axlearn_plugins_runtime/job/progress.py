"""A file that shows the progress of a process to its supervisor. Does not import JAX."""

import os
import time
from pathlib import Path

PROGRESS = "AXLEARN_PROGRESS"
"""Environment variable with the path of a local progress file."""


class Progress:
    """A file with one line: the start of the phase in monotonic seconds, the number of finished steps, and the phase name.

    The line is overwritten at each phase. A write takes microseconds, and a probe may read the file as often as it needs to.
    """

    SIZE = 64

    def __init__(self, path: str | os.PathLike[str]):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @classmethod
    def from_environment(cls) -> "Progress | None":
        """Open the file in `AXLEARN_PROGRESS`. Returns None if the variable is not set or the file cannot be written."""
        path = os.environ.get(PROGRESS)
        try:
            return cls(path) if path else None
        except OSError:
            return None

    def write(self, phase: str, step: int) -> None:
        """Write the phase that begins now."""
        line = f"{time.monotonic():.3f} {step} {phase}".encode()[: self.SIZE - 1]
        try:
            os.pwrite(self._descriptor, line.ljust(self.SIZE - 1) + b"\n", 0)
        except OSError:  # a full disk must not end the run
            return

    @staticmethod
    def read(path: str | os.PathLike[str]) -> tuple[float, int, str] | None:
        """Return (start on the monotonic clock, finished steps, phase), or None if nothing was written yet."""
        try:
            since, step, phase = Path(path).read_text().split()
            return float(since), int(step), phase
        except (OSError, ValueError):
            return None
