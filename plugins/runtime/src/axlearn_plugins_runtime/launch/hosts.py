"""The hosts of a job: which are ready, which train, which failed too often."""

from collections.abc import Sequence

import attrs


@attrs.define(kw_only=True, eq=False)
class Host:
    """One host of the pool.

    Attributes:
        number: in the pool.
        name: for people, once known.
        address: that others reach it by.
        present: whether its agent answers.
        proven: whether a process became ready there since it last failed.
        training: whether ranks run there.
        deaths: how often something died there by its own fault.
        aside: whether it failed too often.
    """

    number: int
    limit: int
    name: str = ""
    address: str = "127.0.0.1"
    present: bool = True
    proven: bool = False
    training: bool = False
    deaths: int = 0
    aside: bool = False
    last_reason: str = ""

    def __attrs_post_init__(self) -> None:
        self.name = self.name or f"host-{self.number}"

    @property
    def condition(self) -> str:
        """For people."""
        if self.aside:
            return f"set aside after {self.deaths} deaths, the last one: {self.last_reason}"
        if not self.present:
            return f"lost: {self.last_reason}"
        return "ready" if self.proven else "starting"

    def came(self, name: str, address: str) -> None:
        """Its agent answers; where it is another machine than before, its deaths are forgotten."""
        if self.name != name:
            self.deaths, self.aside = 0, False
        self.name, self.address, self.present = name, address, True

    def arrived(self) -> None:
        """A process became ready there."""
        self.present = self.proven = True

    def begin(self) -> None:
        """It trains."""
        self.training = True

    def end(self) -> None:
        """It trains no longer."""
        self.training = False

    def lost(self, reason: str) -> None:
        """Its agent is gone."""
        self.present = self.proven = False
        self.last_reason = reason

    def failed(self, reason: str) -> bool:
        """Counts a death; returns whether the host is set aside from now on. It has to show again that it works."""
        self.deaths += 1
        self.proven = False
        self.last_reason = reason if self.present else self.last_reason
        before, self.aside = self.aside, self.deaths >= self.limit
        return self.aside and not before


class Hosts:
    """All hosts of a pool.

    Args:
        count: of them.
        limit: deaths after which one is set aside.
    """

    def __init__(self, count: int, limit: int):
        self.all = [Host(number=number, limit=limit) for number in range(count)]

    def ready(self) -> list[Host]:
        """Those that an attempt can use now."""
        return [h for h in self.all if h.present and h.proven and not h.aside and not h.training]

    def waiting(self) -> list[Host]:
        """Those that may become ready."""
        return [h for h in self.all if not h.aside and not h.proven and not h.training]

    @staticmethod
    def place(ready: Sequence[Host], before: Sequence[Host], count: int) -> list[Host]:
        """Hosts by rank: whoever trained keeps its rank, the others take the places of those that are gone.

        A host that died in the last attempt comes after the others: a spare is healthy for longer.
        """
        placed: list[Host | None] = [h if h in ready else None for h in before[:count]]
        placed += [None] * (count - len(placed))
        used = {id(h) for h in placed if h is not None}
        free = sorted((h for h in ready if id(h) not in used), key=lambda h: h.deaths)
        return [h if h is not None else free.pop(0) for h in placed]
