"""How much a job may fail before it is stopped, and what counts as no progress."""

from collections.abc import Mapping

import attrs

from axlearn_plugins_runtime.launch.exits import DEFAULT_BUDGETS, Death


@attrs.frozen(kw_only=True)
class Limits:
    """Of one job.

    Attributes:
        budgets: kind of death -> restarts.
        host_deaths: deaths at a host by its own fault after which it is set aside.
        crash_loop: deaths in a row without a newer checkpoint between them, at which the job stops.
        freeze_seconds: how long a process may be stopped by a signal.
        hang_seconds: how long a step, or waiting for a batch, may take.
        save_seconds: how long a save may hold training up; the last one of a run waits until everything is written.
        start_seconds: how long any other phase may take, and the first step.
        host_seconds: how long to wait for a host before training goes on with fewer. The first attempt waits ten times as long
            for all of them.
        settle_seconds: how long to wait for the cause where a process only says that it lost another.
        grace_seconds: how long processes may take to save after SIGTERM.
        look_seconds: the longest wait for an event.
    """

    budgets: Mapping[str, int] = attrs.field(factory=lambda: dict(DEFAULT_BUDGETS))
    host_deaths: int = 3
    crash_loop: int = 5
    freeze_seconds: float = 5.0
    hang_seconds: float = 600.0
    save_seconds: float = 2400.0
    start_seconds: float = 3600.0
    host_seconds: float = 120.0
    settle_seconds: float = 2.0
    grace_seconds: float = 300.0
    look_seconds: float = 0.5

    def of_phase(self, phase: str, steps: int) -> float:
        """Seconds that a phase may take.

        Args:
            phase: of the trainer.
            steps: that this process has finished since it started.
        """
        if phase == "save":
            return self.save_seconds
        return self.hang_seconds if phase in ("input", "step") and steps > 0 else self.start_seconds


class Tally:
    """Counts deaths against the limits."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counts: dict[str, int] = {}
        self._start: int | None = None
        self._fruitless = 0

    def count(self, death: Death, start_step: int | None) -> str | None:
        """Takes in the death of an attempt.

        Args:
            death: its root cause.
            start_step: the step of the checkpoint that the attempt began with; None where it did not get there.

        Returns:
            Why the job has to stop; None where it may start again.
        """
        kind = "infrastructure" if death.kind == "peer" else death.kind
        self.counts[kind] = self.counts.get(kind, 0) + 1
        budget = self.limits.budgets.get(kind, 0)
        if self.counts[kind] > budget:
            return f"{_WORDS[kind]} ended the run {self.counts[kind]} times; its budget is {budget} restarts"
        if start_step is not None and (self._start is None or start_step > self._start):
            self._start, self._fruitless = start_step, 0
        self._fruitless += 1
        if self._fruitless >= self.limits.crash_loop:
            begun = "before the first step" if self._start is None else f"all from step {self._start}"
            return f"{self._fruitless} deaths without a newer checkpoint between them ({begun}): a crash loop"
        return None

    @staticmethod
    def advice(death: Death) -> str:
        """What to do about it."""
        if death.kind in ("user", "data"):
            return (
                "fix: the error is in the log of that rank; --option budget-user=N, budget-data=N allow more restarts"
            )
        return "fix: look at the hosts named in processes.jsonl; save more often where deaths come before a checkpoint"


_WORDS = {
    "user": "an error of the training code",
    "data": "an error of the data",
    "stalled": "no progress",
    "infrastructure": "a failure of hosts or processes",
    "preempted": "preemption",
}
