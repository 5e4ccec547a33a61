"""The hosts of a job and their states."""

from collections.abc import Sequence

import attrs


@attrs.define(kw_only=True, eq=False)
class Host:
    """A host of the pool.

    Attributes:
        number: Index in the pool.
        limit: Number of deaths after which the host is set aside.
        name: Name for use in messages.
        address: Address at which other hosts can reach it.
        present: True if its agent responds.
        proven: True if a process became ready on it since its last failure.
        training: True if ranks run on it.
        deaths: Number of deaths that it caused.
        excluded: True if it failed too often.
        last_reason: Reason for its last failure.
    """

    number: int
    limit: int
    name: str = ""
    address: str = "127.0.0.1"
    present: bool = True
    proven: bool = False
    training: bool = False
    deaths: int = 0
    excluded: bool = False
    last_reason: str = ""

    def __attrs_post_init__(self) -> None:
        self.name = self.name or f"host-{self.number}"

    @property
    def condition(self) -> str:
        """Condition of the host, for messages."""
        if self.excluded:
            return f"set aside after {self.deaths} deaths, the last: {self.last_reason}"
        if not self.present:
            return f"lost: {self.last_reason}"
        return "ready" if self.proven else "starting"

    def set_agent(self, name: str, address: str) -> None:
        """Record that the agent responds. Reset the deaths if it runs on a different machine than before."""
        if self.name != name:
            self.deaths, self.excluded = 0, False
        self.name, self.address, self.present = name, address, True

    def mark_ready(self) -> None:
        """Record that a process became ready."""
        self.present = self.proven = True

    def begin(self) -> None:
        """Record that the host trains."""
        self.training = True

    def end(self) -> None:
        """Record that the host no longer trains."""
        self.training = False

    def mark_lost(self, reason: str) -> None:
        """Record that the agent is gone."""
        self.present = self.proven = False
        self.last_reason = reason

    def record_death(self, reason: str) -> bool:
        """Count a death. Return True if the host is now set aside.

        A process must become ready on the host before the host is used again.
        """
        self.deaths += 1
        self.proven = False
        self.last_reason = reason if self.present else self.last_reason
        before, self.excluded = self.excluded, self.deaths >= self.limit
        return self.excluded and not before


class Hosts:
    """All hosts of a pool.

    Args:
        count: Number of hosts.
        limit: Number of deaths after which a host is set aside.
    """

    def __init__(self, count: int, limit: int):
        self.all = [Host(number=number, limit=limit) for number in range(count)]

    def ready(self) -> list[Host]:
        """Return the hosts that an attempt can use now."""
        return [h for h in self.all if h.present and h.proven and not h.excluded and not h.training]

    def waiting(self) -> list[Host]:
        """Return the hosts that may become ready."""
        return [h for h in self.all if not h.excluded and not h.proven and not h.training]

    @staticmethod
    def place(ready: Sequence[Host], before: Sequence[Host], count: int) -> list[Host]:
        """Assign hosts to ranks. Hosts that already trained keep their ranks, and other hosts replace missing ones.

        Hosts with fewer deaths are used first.
        """
        usable = {id(h) for h in ready}
        placed: list[Host | None] = [h if id(h) in usable else None for h in before[:count]]
        placed += [None] * (count - len(placed))
        used = {id(h) for h in placed if h is not None}
        free = iter(sorted((h for h in ready if id(h) not in used), key=lambda h: h.deaths))
        return [h if h is not None else next(free) for h in placed]
