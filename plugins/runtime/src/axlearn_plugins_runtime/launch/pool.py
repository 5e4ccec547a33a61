"""The interface between the supervisor and the engine that provides its hosts."""

from collections.abc import Sequence
from typing import Any, Protocol

from axlearn_core.errors import WorkError


class Pool(Protocol):
    """The hosts of an engine, by number. Agent reports and lost hosts arrive as events."""

    count: int

    def call(self, host: int, method: str, *args: Any) -> None:
        """Call a method of the host's agent without waiting for the result. A lost host is reported as an event."""
        ...

    def ask(self, host: int, method: str, *args: Any) -> Any:
        """Call a method of the host's agent and return the result. Raise `HostLostError` if the host is lost."""
        ...

    def ask_all(self, hosts: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        """Call a method of several agents in parallel. Return the results by host, excluding lost hosts."""
        ...

    def wait(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """Wait up to `timeout` seconds. Return the (host, event) pairs. A lost host is reported as a `lost` event."""
        ...

    def revive(self, host: int) -> None:
        """Ask the engine for a new agent in place of a lost one. The `host` and `ready` events report the new agent."""
        ...

    def close(self) -> None:
        """End all agents."""
        ...


class HostLostError(WorkError):
    """Raised if a host or its agent is gone."""
