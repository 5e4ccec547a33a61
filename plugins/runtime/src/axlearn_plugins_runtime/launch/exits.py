"""Classification of process exits by exit code, signal, and the process's own report."""

import signal
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

Kind = Literal["finished", "preempted", "request", "user", "data", "stalled", "infrastructure", "peer"]
"""Kind of exit.

`request`: the request is invalid. `user`: an error in the training code. `data`: an error in its input. `stalled`: no progress, or
a restart by the watchdog. `peer`: another process ended or could not be reached. Everything else is `infrastructure`."""

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
"""Substrings of the errors that JAX and XLA raise if a process cannot reach another process."""


@attrs.frozen(kw_only=True)
class Exit:
    """The exit of a process.

    Attributes:
        code: Exit code as returned by `wait`. Negative for a signal.
        kind: Kind of exit that the process reported, or empty.
        message: Error message.
    """

    code: int
    kind: str = ""
    message: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the message for the agent."""
        return {"exit": self.code, "kind": self.kind, "message": self.message}


@attrs.frozen(kw_only=True)
class Death:
    """The exit of a rank's process, or the loss of its host.

    Attributes:
        rank: The rank.
        kind: Kind of exit.
        reason: One line for the user.
        host_at_fault: True if the host is considered the cause.
    """

    rank: int
    kind: Kind
    reason: str
    host_at_fault: bool = False


def classify_error(error: BaseException) -> Kind:
    """Return the kind of an exception that ended a run."""
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
    """Return True if a message is about a connection between processes."""
    lower = text.lower()
    return any(word in lower for word in _CONNECTION)


def classify_exit(end: Exit, tail: str, phase: str = "") -> tuple[Kind, str]:
    """Return (kind, reason) of an exit.

    Args:
        end: Exit code and report of the process.
        tail: Last lines of its output.
        phase: Phase that the process was in. An error while it waited for a batch counts as a data error.
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
        return "stalled", "its watchdog requested a restart (exit code 75)"
    if end.kind == "user" and phase == "input":
        return "data", end.message.partition("\n")[0]
    if end.kind:
        return end.kind, end.message.partition("\n")[0] or f"exit code {end.code}"  # type: ignore[return-value]
    if end.code == 2:
        return "request", _last_line(tail) or "exit code 2"
    return "user", _last_line(tail) or f"exit code {end.code}"


_RANK = ("request", "infrastructure", "stalled", "data", "user", "preempted", "peer")


def root_cause(deaths: Iterable[Death]) -> Death | None:
    """Return the death that caused all other deaths, or None if `deaths` is empty."""
    return min(deaths, key=severity, default=None)


def severity(death: Death) -> int:
    """Return the key that sorts deaths by how likely they are the cause of the others. The most likely one is first."""
    return _RANK.index(death.kind)


DEFAULT_BUDGETS: Mapping[str, int] = {"infrastructure": 1000, "preempted": 1000, "stalled": 10, "data": 3, "user": 1}
"""Default number of restarts by kind.

A `request` failure never causes a restart, and a `peer` failure counts as `infrastructure`.
"""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
