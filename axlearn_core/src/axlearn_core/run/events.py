"""What happens to a run while it is trained, and who listens: trackers, watchdog, profiler, clock, and the parts of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


class RunListener:
    """Takes part in a run without changing what it computes. Every method does nothing unless a subclass overrides it.

    Each process calls its listeners in the order of registration, on the main thread unless a method says otherwise.
    """

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
        """A save is about to begin, or the last one is complete. Raising stops the run before anything is written."""

    def saved(self, step: int, reason: str | None) -> None:
        """A save ended: complete if `reason` is None. May be called from any thread."""

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

    def add(self, listener: RunListener) -> None:
        """Registers a listener behind the others."""
        self.listeners.append(listener)
        for event in EVENTS:
            if getattr(type(listener), event) is not vars(RunListener)[event]:
                self._calls[event].append(getattr(listener, event))

    def phase(self, name: str, step: int, count_as: str | None = None) -> None:
        """See `RunListener.phase`."""
        for call in self._calls["phase"]:
            call(name, step, count_as)

    def notify(self, event: str, *arguments: Any) -> None:
        """Calls the method `event` of every listener that overrides it."""
        for call in self._calls[event]:
            call(*arguments)
