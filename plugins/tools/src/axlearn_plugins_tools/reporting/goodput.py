"""Goodput: the share of a run's time spent on training steps that were kept, and how the remaining time was spent."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

PRODUCTIVE = ("rollout", "step")
"""Phases that count as productive, if their steps were kept. A rollout samples the data of a step."""
BADPUT = {
    "start": "start: imports, building components",
    "restore": "restore: reading a checkpoint",
    "compile": "compile: initialization, compilation",
    "input": "input wait: devices waiting for a batch",
    "evaluate": "evaluation",
    "save": "save: training blocked by checkpoints",
    "lost": "lost work: steps repeated after an interruption",
    "idle": "idle: between attempts",
}
"""Labels of unproductive time in a report, by phase."""


@attrs.frozen(kw_only=True)
class Attempt:
    """One start of a run.

    Attributes:
        begin: Start time.
        last: Time of the last record.
        first_step: Number of completed steps at the start.
        last_step: Number of completed steps at the last record.
        seconds: Seconds by phase.
        ended: Whether the process ended on its own (finished, stopped or failed) and was not killed.
        place: Host and process id.
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
    """Time of all attempts, broken down by what it was spent on.

    Attributes:
        attempts: All attempts, oldest first.
        seconds: Seconds for `productive` and for each key of `BADPUT`. The sum is the time from the first record to the last.
    """

    attempts: Sequence[Attempt]
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds from the first start to the last record."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Productive share of the time."""
        return self.seconds["productive"] / self.total if self.total else 0.0


def read_attempts(records: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """Return the attempts in the records of `phases.jsonl`, oldest first.

    Raises:
        ValueError: If a record has no time, step or seconds.
    """
    attempts = []
    try:
        for name, group in itertools.groupby(records, lambda r: r["attempt"]):
            attempt_records = list(group)
            newest = attempt_records[-1]
            attempts.append(
                Attempt(
                    begin=datetime.fromisoformat(name),
                    last=datetime.fromisoformat(newest["time"]),
                    first_step=int(attempt_records[0]["step"]),
                    last_step=int(newest["step"]),
                    seconds={str(k): float(v) for k, v in newest["seconds"].items()},
                    ended=newest["event"] == "end",
                    place=f"{newest.get('host', '?')}, process {newest.get('pid', '?')}",
                )
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record of phases is incomplete: {error}") from error
    # A killed attempt may have saved steps after its last record. The next attempt starts from them.
    return [
        attrs.evolve(attempt, last_step=max(attempt.last_step, following.first_step)) if following else attempt
        for attempt, following in itertools.zip_longest(attempts, attempts[1:])
    ]


def compute_goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Return the goodput of attempts.

    Steps that the next attempt repeats count as lost. Their time is estimated from the attempt's mean time per step.
    """
    seconds = dict.fromkeys(("productive", *BADPUT), 0.0)
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        stepping = sum(attempt.seconds.get(phase, 0.0) for phase in PRODUCTIVE)
        trained = attempt.last_step - attempt.first_step
        repeated = max(0, attempt.last_step - following.first_step) if following else 0
        lost = stepping * min(1.0, repeated / trained) if trained else stepping
        seconds["productive"] += stepping - lost
        seconds["lost"] += lost
        for phase, value in attempt.seconds.items():
            if phase not in PRODUCTIVE:
                key = phase if phase in BADPUT else "start"
                seconds[key] += value
        if following:
            seconds["idle"] += max(0.0, (following.begin - attempt.last).total_seconds())
    return Goodput(attempts=attempts, seconds=seconds)
