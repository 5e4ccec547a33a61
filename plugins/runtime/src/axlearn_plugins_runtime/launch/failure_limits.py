"""Limits on failures and stalls in a job."""

from collections.abc import Mapping

import attrs

from axlearn_core.errors import counted
from axlearn_plugins_runtime.launch.exits import DEFAULT_BUDGETS, Death


@attrs.frozen(kw_only=True)
class Limits:
    """Limits for a job.

    Attributes:
        budgets: Allowed number of restarts for each kind of death.
        host_deaths: A host is set aside after it has caused this many deaths.
        crash_loop: The job stops after this many consecutive deaths without a newer checkpoint.
        freeze_seconds: Maximum time for which a signal may stop a process.
        hang_seconds: Maximum time of a step, or of a wait for a batch.
        save_seconds: Maximum time of a save. The last save of a run waits until everything is written.
        start_seconds: Maximum time of the first step and of any other phase.
        host_seconds: Time to wait for a host before training resumes with fewer hosts. The first attempt waits ten times as long
            for all hosts.
        settle_seconds: Time to wait for the root cause after a process reports a lost peer.
        grace_seconds: Maximum time that a process may take to save after SIGTERM.
        look_seconds: Maximum wait for an event.
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

    def phase_limit(self, phase: str, steps: int) -> float:
        """Return the limit for a phase in seconds.

        Args:
            phase: Phase of the trainer.
            steps: Steps that this process has finished since it started.
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
        """Count the death of an attempt.

        Args:
            death: Root cause of the attempt's end.
            start_step: Step of the checkpoint that the attempt started from, or None if it did not start.

        Returns:
            The reason to stop the job, or None if it may restart.
        """
        kind = "infrastructure" if death.kind == "peer" else death.kind
        self.counts[kind] = self.counts.get(kind, 0) + 1
        budget = self.limits.budgets.get(kind, 0)
        if self.counts[kind] > budget:
            times = counted(self.counts[kind], "time")
            return f"{_DESCRIPTIONS[kind]} ended the run {times}; the budget is {counted(budget, 'restart')}"
        if start_step is not None and (self._start is None or start_step > self._start):
            self._start, self._fruitless = start_step, 0
        self._fruitless += 1
        if self._fruitless >= self.limits.crash_loop:
            origin = "before the first step" if self._start is None else f"all from step {self._start}"
            return f"crash loop: {self._fruitless} deaths in a row without a newer checkpoint ({origin})"
        return None

    @staticmethod
    def advice(death: Death) -> str:
        """Return the line of a message that suggests a fix for a death."""
        if death.kind in ("user", "data"):
            return "fix: see the error in the log of that rank; --option budget-user=N or budget-data=N allows more restarts"
        return "fix: check the hosts in processes.jsonl; save more often if processes die before a checkpoint"


_DESCRIPTIONS = {
    "user": "an error in the training code",
    "data": "an error in the data",
    "stalled": "no progress",
    "infrastructure": "a failure of hosts or processes",
    "preempted": "preemption",
}
