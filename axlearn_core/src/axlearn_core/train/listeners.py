"""Listeners of a run: the config's trackers, watchdog and profiler, and the listeners from installed packages."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from axlearn_core.contracts.capabilities import MirrorsRun, ObservesSteps, StopsEarly
from axlearn_core.contracts.parts import Profiler, Tracker, Watchdog
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import Entry
from axlearn_core.plugins.targets import load
from axlearn_core.run.events import POSITIONS, RunListener
from axlearn_core.run.notices import log_message

INSTALL = "pip install axlearn-plugins-runtime"


class TrackerListener(RunListener):
    """Forwards logged values to a tracker. See `axlearn_core.contracts.parts.Tracker`.

    Args:
        build: Builds the tracker. Called only on process 0. The tracker may write to the run directory.
        info: Facts about the run, without its step and directory.
    """

    def __init__(self, build: Callable[[], Tracker], info: Mapping[str, Any]):
        self._build, self.info = build, info
        self._tracker: Tracker | None = None

    @property
    def tracker(self) -> Tracker:
        """The tracker. It exists once the run has been restored."""
        assert self._tracker is not None
        return self._tracker

    def restored(self, run: Any) -> None:
        """Build the tracker and start it at the step of the run."""
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
    """Sends heartbeats to a watchdog. See `axlearn_core.contracts.parts.Watchdog`."""

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
    """Also passes the scalars of finished steps to the watchdog."""

    watchdog: Any

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """See `axlearn_core.contracts.capabilities.ObservesSteps`."""
        self.watchdog.observe(step, values)


def watchdog_listener(watchdog: Watchdog) -> WatchdogListener:
    """Return the listener for a watchdog. If the watchdog observes steps, the listener also passes it each step's scalars."""
    return (ObservingWatchdogListener if isinstance(watchdog, ObservesSteps) else WatchdogListener)(watchdog)


class ProfilerListener(RunListener):
    """Calls a profiler before and after each step. See `axlearn_core.contracts.parts.Profiler`."""

    def __init__(self, build: Callable[[], Profiler]):
        self._build = build
        self.profiler: Any = None

    def restored(self, run: Any) -> None:
        """Build the profiler, which may write to the run directory."""
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


def plugin_listeners(session: Any) -> list[tuple[RunListener, Entry | None]]:
    """Return the listeners from installed packages, ordered by `RunListener.position`.

    Returns:
        Each listener with the plugin to name in its errors, or None.

    Raises:
        PluginError: A plugin's function fails, or its result is neither a `RunListener` nor None.
    """
    listeners: list[tuple[RunListener, Entry | None]] = []
    for plugin, locations in host().call_with_entries("axlearn_run_listeners"):
        for location in locations:
            try:
                make: Any = load(location)
                listener = make(session)
                if listener is not None and not isinstance(listener, RunListener):
                    raise TypeError(f"it returned {listener!r}, not a RunListener")
            except AxlearnError:
                raise
            except Exception as error:  # a plugin may raise anything
                raise plugin.wrap_error(f"has a run listener that cannot be built: {location}", error) from error
            if listener is not None:
                listeners.append((listener, plugin if listener.errors_name_plugin else None))
    return sorted(listeners, key=lambda entry: POSITIONS.index(entry[0].position))


def check_job(session: Any, listeners: Iterable[RunListener]) -> None:
    """Log a note if no installed plugin handles signals and locks the run directory.

    Raises:
        RequestError: The run is at a URI, but no installed plugin copies its files there.
    """
    listeners = list(listeners)
    if session.uri is not None and not any(isinstance(listener, MirrorsRun) for listener in listeners):
        raise RequestError(
            f"--run-dir {session.uri}: no installed plugin copies a run's files to storage\n    fix: {INSTALL}"
        )
    if not any(isinstance(listener, StopsEarly) for listener in listeners):
        log_message(
            "note: Ctrl-C and SIGTERM end this run without saving, and its directory is not locked against a second trainer\n"
            f"    fix: {INSTALL}"
        )
