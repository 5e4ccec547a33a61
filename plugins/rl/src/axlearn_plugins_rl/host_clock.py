"""The time that a loop of rollouts and steps spends on its own work."""

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

from axlearn_core.run.events import RunListener

YOUNG_OBJECTS = 100_000, 10, 10
"""Thresholds of the garbage collector: a batch of rollouts creates more objects than the default of 700."""


class HostClock(RunListener):
    """Measures the work of the main thread between rollouts and steps.

    It counts the time to build a batch, to dispatch the step, and to log. It does not count the time in which the thread waits for
    rollouts, writes them to a file while the step computes, evaluates or saves.
    """

    def __init__(self) -> None:
        self._start: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Stop counting."""
        if self._start is not None:
            self._seconds += time.perf_counter() - self._start
            self._start = None

    def lap(self) -> float:
        """Return the seconds since the last call. The clock goes on."""
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        self.start()
        return seconds

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """Do not count compilations."""
        if name == "compile":
            self.stop()

    def step_dispatched(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Stop counting. Evaluations and saves may follow."""
        self.stop()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the present objects from garbage collection, and collect less often.

    Each batch creates many objects, which soon starts a full collection. It would visit the objects of JAX and of the program each
    time, which takes longer than a small step.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
