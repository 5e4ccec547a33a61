"""Trackers, watchdog, profiler and clock as listeners of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from axlearn_core.contracts.capabilities import ObservesSteps
from axlearn_core.contracts.parts import Profiler, Tracker, Watchdog
from axlearn_core.run.events import RunListener
from axlearn_core.run.mirror import RunMirror
from axlearn_core.run.phases import PhaseClock


class MirrorListener(RunListener):
    """Keeps a run at a URI up to date with its working copy, from the first process."""

    def __init__(self, uri: str, path: Path):
        self.mirror = RunMirror(uri, path)
        self._is_fetched = False

    def opened(self, run: Any) -> None:
        """Fetches the working copy."""
        if jax.process_index() == 0:
            self.mirror.fetch()
            self._is_fetched = True

    def saving(self, step: int) -> None:
        """Brings to the storage what changed."""
        self.closed()

    def closed(self) -> None:
        """Brings to the storage what changed."""
        if self._is_fetched:
            self.mirror.push()


class TrackerListener(RunListener):
    """Hands what is logged to a tracker; see `axlearn_core.contracts.parts.Tracker`.

    Args:
        build: builds the tracker of the first process, which may write to the run directory.
        info: the facts of the run, less its step and directory.
    """

    def __init__(self, build: Callable[[], Tracker], info: Mapping[str, Any]):
        self._build, self.info = build, info
        self._tracker: Tracker | None = None

    @property
    def tracker(self) -> Tracker:
        """The tracker, once the run is restored."""
        assert self._tracker is not None
        return self._tracker

    def restored(self, run: Any) -> None:
        """Builds the tracker and starts it at the step of the run."""
        self._tracker = self._build()
        self._tracker.start({**self.info, "start_step": run.step, "run_dir": str(run.path)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self.tracker.log(step, values)

    def text(self, step: int, name: str, value: str) -> None:
        """See `Tracker.text`."""
        self.tracker.text(step, name, value)

    def closed(self) -> None:
        """See `Tracker.close`."""
        if self._tracker is not None:
            self._tracker.close()


class WatchdogListener(RunListener):
    """Tells a watchdog that the run lives; see `axlearn_core.contracts.parts.Watchdog`."""

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog

    def opened(self, run: Any) -> None:
        """See `Watchdog.start`."""
        self.watchdog.start()

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """See `Watchdog.beat`."""
        self.watchdog.beat(name, step)

    def closed(self) -> None:
        """See `Watchdog.close`."""
        self.watchdog.close()


class ObservingWatchdogListener(WatchdogListener):
    """Also shows the scalars of finished steps to the watchdog."""

    watchdog: Any

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """See `axlearn_core.contracts.capabilities.ObservesSteps`."""
        self.watchdog.observe(step, values)


def listen_with(watchdog: Watchdog) -> WatchdogListener:
    """The listener of a watchdog, with the scalars of steps if it observes them."""
    return (ObservingWatchdogListener if isinstance(watchdog, ObservesSteps) else WatchdogListener)(watchdog)


class ProfilerListener(RunListener):
    """Calls a profiler around each step; see `axlearn_core.contracts.parts.Profiler`."""

    def __init__(self, build: Callable[[], Profiler]):
        self._build = build
        self.profiler: Any = None

    def restored(self, run: Any) -> None:
        """Builds the profiler, which may write to the run directory."""
        self.profiler = self._build()

    def step_begins(self, step: int) -> None:
        """See `Profiler.before`."""
        self.profiler.before(step)

    def step_dispatched(self, step: int, scalars: Mapping[str, jax.Array]) -> None:
        """See `Profiler.after`."""
        self.profiler.after(step, scalars)

    def closed(self) -> None:
        """See `Profiler.close`."""
        if self.profiler is not None:
            self.profiler.close()


class ClockListener(RunListener):
    """Adds up the time of each phase, and records it from the first process."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
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
