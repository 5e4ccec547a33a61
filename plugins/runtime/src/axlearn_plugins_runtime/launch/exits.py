"""How processes end, told apart: by exit code, signal, and what the process itself said."""

import signal
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

Kind = Literal["finished", "preempted", "request", "user", "data", "stalled", "infrastructure", "peer"]
"""`request`: wrong from the start. `user`: an error of the training code. `data`: of its input. `stalled`: no progress, or the
watchdog's restart. `peer`: this process ended because another one did, or could not be reached. The rest is infrastructure."""

WATCHDOG = 75
PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
_CONNECTION = (
    "gloo",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "coordination service",
    "coordination agent",
    "distributed service",
    "heartbeat",
    "unavailable:",
    "deadline_exceeded",
    "nccl",
    "barrier",
    "peer",
)
"""In the messages of JAX's and XLA's errors where a process cannot reach another."""


@attrs.frozen(kw_only=True)
class Exit:
    """The end of a process.

    Attributes:
        code: of `wait`: negative for a signal.
        kind: what the process said itself; empty where it said nothing.
        message: of the error.
    """

    code: int
    kind: str = ""
    message: str = ""

    def to_message(self) -> dict[str, Any]:
        """For the agent."""
        return {"exit": self.code, "kind": self.kind, "message": self.message}


@attrs.frozen(kw_only=True)
class Death:
    """The end of one rank's process, or of its host.

    Attributes:
        reason: one line for people.
        at_fault: whether its host is counted as having failed.
    """

    rank: int
    kind: Kind
    reason: str
    at_fault: bool = False


def classify_error(error: BaseException) -> Kind:
    """The kind of an exception that ended a run."""
    from axlearn_core.errors import InputError, RequestError, StorageError

    if isinstance(error, InputError) or isinstance(error.__cause__, InputError):
        return "data"
    if isinstance(error, StorageError | OSError):
        return "infrastructure"
    if isinstance(error, RequestError):
        return "request"
    runtime = type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError", "DistributedRuntimeError")
    if (runtime or "gloo" in str(error).lower()) and mentions_connection(str(error)):
        return "peer"
    return "user"


def mentions_connection(text: str) -> bool:
    """Whether a message is of a connection between processes."""
    lower = text.lower()
    return any(word in lower for word in _CONNECTION)


def classify_exit(end: Exit, tail: str, phase: str = "") -> tuple[Kind, str]:
    """(kind, reason) of a process that ended.

    Args:
        end: its code, and what it said.
        tail: the last lines that it wrote.
        phase: that it was in: an error while it waited for a batch is one of the data.
    """
    if end.code == 0:
        return "finished", "finished"
    if end.code < 0:
        name = _signal_name(-end.code)
        if -end.code == signal.SIGABRT and mentions_connection(tail):
            return "peer", f"{name}: it lost the coordinator or another process"
        return "infrastructure", f"killed by {name}"
    if end.code in PREEMPTED:
        return "preempted", f"stopped by {_signal_name(end.code - 128)} after saving"
    if end.code == WATCHDOG:
        return "stalled", "its watchdog asked for a restart (exit code 75)"
    if end.kind == "user" and phase == "input":
        return "data", end.message.partition("\n")[0]
    if end.kind:
        return end.kind, end.message.partition("\n")[0] or f"exit code {end.code}"  # type: ignore[return-value]
    if end.code == 2:
        return "request", _last_line(tail) or "exit code 2"
    return "user", _last_line(tail) or f"exit code {end.code}"


_RANK = ("request", "infrastructure", "stalled", "data", "user", "preempted", "peer")


def root_cause(deaths: Iterable[Death]) -> Death | None:
    """The death that the others follow from."""
    return min(deaths, key=lambda death: _RANK.index(death.kind), default=None)


DEFAULT_BUDGETS: Mapping[str, int] = {"infrastructure": 1000, "preempted": 1000, "stalled": 10, "data": 3, "user": 1}
"""Restarts for each kind; a `request` has none, and `peer` counts as infrastructure."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
