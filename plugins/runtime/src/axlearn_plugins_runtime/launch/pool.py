"""What a supervisor asks of the engine that has its hosts."""

from collections.abc import Sequence
from typing import Any, Protocol

from axlearn_core.errors import WorkError


class Pool(Protocol):
    """The hosts of an engine, by number. What an agent says, and that one is lost, comes as events."""

    count: int

    def call(self, host: int, method: str, *args: Any) -> None:
        """Calls a method of the host's agent and waits for no result. Where the host is lost, an event says so."""
        ...

    def ask(self, host: int, method: str, *args: Any) -> Any:
        """The result of a method of the host's agent; raises `HostLostError`."""
        ...

    def ask_all(self, hosts: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        """Host -> the result of a method of its agent, asked of all at once; those that are lost are left out."""
        ...

    def wait(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """(host, event) of what happened, at the latest after `timeout` seconds; a lost host is the event `lost`."""
        ...

    def revive(self, host: int) -> None:
        """Asks the engine for a new agent in the place of a lost one; its event `ready` says that it came."""
        ...

    def close(self) -> None:
        """Ends all agents."""
        ...


class HostLostError(WorkError):
    """A host, or its agent, is gone."""
