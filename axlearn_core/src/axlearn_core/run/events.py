"""What happens to a run while it is trained, and who listens: trackers, watchdog, profiler, clock, and the parts of jobs."""

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
"""Set by the command line, whose process is the run's: a listener may end the process."""


class RunListener:
    """Takes part in a run without changing what it computes. Every method does nothing unless a subclass overrides it.

    Each process calls its listeners in the order of registration, on the main thread unless a method says otherwise.

    Attributes:
        position: `first` registers a plugin's listener before those of other plugins, and so closes it after them: a lock.
            `last` registers it behind trackers, watchdog and profiler, and so closes it before them: a clock.
        errors_name_plugin: whether the plugin is named when a method raises. False leaves errors as they are.
    """

    position: ClassVar[Position] = "middle"
    errors_name_plugin: ClassVar[bool] = True

    def opened(self, run: Any) -> None:
        """The parts of the run are built and nothing is written yet. May raise `RequestError` to refuse the run."""

    def restored(self, run: Any) -> None:
        """The run directory is written, and the state is restored or about to be initialized."""

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """A phase begins: `restore`, `compile`, `input`, `step`, `evaluate` or `save`.

        Args:
            name: of the phase.
            step: finished steps.
            count_as: the phase that the time since the last call belongs to, if it is not the one that ended.
        """

    def step_begins(self, step: int) -> None:
        """The step after `step` finished ones is about to be dispatched."""

    def step_dispatched(self, step: int, scalars: Mapping[str, jax.Array]) -> None:
        """Step number `step` is dispatched; waiting for its `scalars` waits for it."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step is finished; `values` are its scalars, such as `loss`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars to log: those of a step, or the results of an evaluation."""

    def text(self, step: int, name: str, value: str) -> None:
        """A sample or message to log."""

    def saving(self, step: int) -> None:
        """A save is about to begin, or the last one is complete. Raising stops the run before anything is written.

        In a job, all processes stop if one raises.
        """

    def saved(self, step: int, reason: str | None) -> None:
        """A save ended: complete if `reason` is None. May be called from any thread. An error is logged and changes nothing."""

    def closed(self) -> None:
        """The run ends, also after an error. Called in the opposite order of registration."""


EVENTS = (
    "opened", "restored", "phase", "step_begins", "step_dispatched", "step", "log", "text", "saving", "saved",
)  # fmt: skip


class RunEvents:
    """The listeners of one run. An event costs nothing for listeners that do not override its method."""

    def __init__(self, listeners: Iterable[RunListener] = ()):
        self.listeners: list[RunListener] = []
        self._calls: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        for listener in listeners:
            self.add(listener)

    def add(self, listener: RunListener, plugin: Entry | None = None) -> None:
        """Registers a listener behind the others.

        Args:
            listener: the listener.
            plugin: that it comes from; errors in its methods then name the plugin and the event.
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
        """Calls the method `event` of every listener that overrides it."""
        for call in self._calls[event]:
            call(*arguments)

    def notify_saved(self, step: int, reason: str | None) -> None:
        """Calls `RunListener.saved`. The save has ended by then, so an error of a listener is only logged."""
        for call in self._calls["saved"]:
            try:
                call(step, reason)
            except Exception as error:  # a listener may raise anything
                log_message(f"warning: {error}", from_all=True)


def name_failures(method: Callable[..., None], plugin: Entry | None) -> Callable[..., None]:
    """A method of a plugin's listener with errors that name the plugin and the event; the method itself without a plugin.

    An error of this framework keeps its class, as a refusal of a run or a save; a message says which plugin raised it.
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
            log_message(f"note: {title} raises the next error, at the event {event}", from_all=True)
            raise
        except Exception as error:  # a plugin's listener may raise anything
            problem = str(plugin.failed(f"has a run listener that failed at the event {event}", error))
            raise WorkError(problem) from error

    return call
