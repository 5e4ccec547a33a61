"""Events of a training run, and the listeners that receive them: trackers, watchdog, profiler, clock, and job components."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from axlearn_core.errors import AxlearnError, WorkError
from axlearn_core.run.notices import log_message

if TYPE_CHECKING:
    import jax

    from axlearn_core.plugins.registry import Entry

Position = Literal["first", "middle", "last"]
POSITIONS: tuple[Position, ...] = get_args(Position)
owns_process = threading.Event()
"""Set by the command line during a run. Listeners may then exit the process, because it does nothing but this run."""


class RunListener:
    """Observes a run without changing its computation. By default, every method does nothing.

    Each process calls its listeners in the order of registration, on the main thread unless a method says otherwise.

    Attributes:
        position: Order of registration. `first` comes before other plugins, so that the listener (a lock, for example) is
            closed after them. `last` comes after trackers, watchdog, and profiler, so that the listener (a clock, for example)
            is closed before them.
        errors_name_plugin: If True, errors name the plugin. If False, errors are propagated unchanged.
    """

    position: ClassVar[Position] = "middle"
    errors_name_plugin: ClassVar[bool] = True

    def opened(self, run: Any) -> None:
        """Called when the run's components have been built, before anything is written. Raise `RequestError` to refuse the run."""

    def restored(self, run: Any) -> None:
        """Called when the run directory has been written, after the state is restored or before it is initialized."""

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """Called when a phase starts: `restore`, `compile`, `input`, `rollout`, `step`, `evaluate`, or `save`.

        Args:
            name: Name of the phase.
            step: Number of finished steps.
            count_as: Phase to attribute the time since the last call to (default: the phase that ended).
        """

    def step_begins(self, step: int) -> None:
        """Called before a step is dispatched. `step` is the number of finished steps."""

    def step_dispatched(self, step: int, scalars: Mapping[str, jax.Array]) -> None:
        """Called after step number `step` has been dispatched. Blocking on its `scalars` waits for the step."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Called after a step has finished, with its scalars, such as `loss`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with scalars to log: the scalars of a step, or the results of an evaluation."""

    def text(self, step: int, name: str, value: str) -> None:
        """Called with a sample or message to log."""

    def saving(self, step: int) -> None:
        """Called before a save, and after the last save is complete. Raise an error to stop the run before the save.

        If one process of a job raises an error, all processes stop.
        """

    def saved(self, step: int, reason: str | None) -> None:
        """Called after a save, from any thread. `reason` is None if it succeeded. Errors in this method are only logged."""

    def closed(self) -> None:
        """Called when the run ends, even after an error, in reverse order of registration."""


EVENTS = (
    "opened", "restored", "phase", "step_begins", "step_dispatched", "step", "log", "text", "saving", "saved",
)  # fmt: skip


class RunEvents:
    """The listeners of a run. Listeners are only called for the methods that they override."""

    def __init__(self, listeners: Iterable[RunListener] = ()):
        self.listeners: list[RunListener] = []
        self._calls: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        for listener in listeners:
            self.add(listener)

    def add(self, listener: RunListener, plugin: Entry | None = None) -> None:
        """Register a listener after the existing ones.

        Args:
            listener: The listener.
            plugin: Plugin that provides it. If given, errors name the plugin and the event.
        """
        self.listeners.append(listener)
        for event in EVENTS:
            if getattr(type(listener), event) is not vars(RunListener)[event]:
                self._calls[event].append(name_failures(getattr(listener, event), plugin))

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """See `RunListener.phase`."""
        for call in self._calls["phase"]:
            call(name, step, count_as)

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the `event` method of every listener that overrides it."""
        for call in self._calls[event]:
            call(*arguments)

    def notify_saved(self, step: int, reason: str | None) -> None:
        """Call `RunListener.saved`. The save has already ended, so errors are only logged."""
        for call in self._calls["saved"]:
            try:
                call(step, reason)
            except Exception as error:  # listeners may raise any error
                log_message(f"warning: {error}", from_all=True)


def name_failures(method: Callable[..., None], plugin: Entry | None) -> Callable[..., None]:
    """Wrap a listener's method so that errors name the plugin and the event. Return it unchanged if there is no plugin.

    Errors from this framework keep their class, because they refuse a run or a save. A message names the plugin instead.
    """
    if plugin is None:
        return method
    event = method.__name__

    @functools.wraps(method)
    def call(*arguments: Any) -> None:
        try:
            method(*arguments)
        except AxlearnError:
            title = f"{plugin.name} of {plugin.origin}"
            log_message(f"note: the next error comes from {title}, at the event {event}", from_all=True)
            raise
        except Exception as error:  # listeners may raise any error
            problem = str(plugin.wrap_error(f"has a run listener that failed at the event {event}", error))
            raise WorkError(problem) from error

    return call
