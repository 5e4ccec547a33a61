"""Goodput: which part of a run's time went into training that was kept, and where the rest went."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

BADPUT = {
    "start": "start: imports, building the parts",
    "restore": "restore: reading a checkpoint",
    "compile": "compile: initialisation, compilation",
    "input": "input wait: devices idle for want of a batch",
    "evaluate": "evaluation",
    "save": "save: training held up by checkpoints",
    "lost": "lost work: steps trained again after an interruption",
    "idle": "idle: between the attempts",
}
"""Time that trains nothing -> what it is called in a report."""


@attrs.frozen(kw_only=True)
class Attempt:
    """One start of a run.

    Attributes:
        begin: when it began.
        last: when its last record was written.
        first_step: the steps that it found.
        last_step: the steps that it had reached at its last record.
        seconds: phase -> seconds.
        ended: whether it ended by itself: done, stopped or failed, not killed.
        place: host and process id.
    """

    begin: datetime
    last: datetime
    first_step: int
    last_step: int
    seconds: Mapping[str, float]
    ended: bool
    place: str


@attrs.frozen(kw_only=True)
class Goodput:
    """The time of all attempts.

    Attributes:
        seconds: `productive` and the keys of `BADPUT` -> seconds; together all the time from the first record to the last.
    """

    attempts: Sequence[Attempt]
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds from the first start to the last record."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The productive share of the time."""
        return self.seconds["productive"] / self.total if self.total else 0.0


def read_attempts(records: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts in the records of `phases.jsonl`, the first one first.

    Raises:
        ValueError: a record has no time, step or seconds.
    """
    attempts = []
    try:
        for name, group in itertools.groupby(records, lambda r: r["attempt"]):
            own = list(group)
            newest = own[-1]
            attempts.append(
                Attempt(
                    begin=datetime.fromisoformat(name),
                    last=datetime.fromisoformat(newest["time"]),
                    first_step=int(own[0]["step"]),
                    last_step=int(newest["step"]),
                    seconds={str(k): float(v) for k, v in newest["seconds"].items()},
                    ended=newest["event"] == "end",
                    place=f"{newest.get('host', '?')}, process {newest.get('pid', '?')}",
                )
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record of phases is not whole: {error}") from error
    # What a killed attempt had saved after its last record is known from the next one.
    return [
        attrs.evolve(attempt, last_step=max(attempt.last_step, following.first_step)) if following else attempt
        for attempt, following in itertools.zip_longest(attempts, attempts[1:])
    ]


def goodput_of(attempts: Sequence[Attempt]) -> Goodput:
    """Adds up attempts. Steps that the next attempt trains again count as lost, at their attempt's mean time per step."""
    seconds = dict.fromkeys(("productive", *BADPUT), 0.0)
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        stepping = attempt.seconds.get("step", 0.0)
        trained = attempt.last_step - attempt.first_step
        again = max(0, attempt.last_step - following.first_step) if following else 0
        lost = stepping * min(1.0, again / trained) if trained else stepping
        seconds["productive"] += stepping - lost
        seconds["lost"] += lost
        for phase, value in attempt.seconds.items():
            if phase != "step":
                key = phase if phase in BADPUT else "start"
                seconds[key] += value
        if following:
            seconds["idle"] += max(0.0, (following.begin - attempt.last).total_seconds())
    return Goodput(attempts=attempts, seconds=seconds)
