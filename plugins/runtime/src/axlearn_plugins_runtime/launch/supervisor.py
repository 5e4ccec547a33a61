"""The supervisor of a job: starts attempts, detects failures, and restarts on the remaining hosts."""

import math
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_runtime.launch.environment import attempt_environment
from axlearn_plugins_runtime.launch.exits import Death, root_cause, severity
from axlearn_plugins_runtime.launch.failure_limits import Limits, Tally
from axlearn_plugins_runtime.launch.hosts import Host, Hosts
from axlearn_plugins_runtime.launch.journal import PROCESSES, Journal
from axlearn_plugins_runtime.launch.pool import HostLostError, Pool

REPORTED = 8
"""Maximum number of deaths to report at a time."""


@attrs.define(kw_only=True)
class _Rank:
    host: Host
    pid: int | None = None
    step: int = 0
    steps: int = 0
    phase: str = "start"
    silent: float = 0.0
    last_event: float = 0.0
    finished: bool = False


@attrs.define(kw_only=True)
class Attempt:
    """The processes that train together.

    Attributes:
        number: Number of the attempt.
        ranks: Processes by rank.
        start_step: Step of the checkpoint that they started from, or None if not known yet.
        num_stepping: Number of processes that have finished a step.
        has_stepped: True once all of them have.
        last_step: Newest step of any process.
        checked: When the silence of the processes was checked.
    """

    number: int
    ranks: dict[int, _Rank]
    start_step: int | None = None
    num_stepping: int = 0
    has_stepped: bool = False
    last_step: int = 0
    checked: float = -math.inf


Reduce = Callable[[int], Sequence[str] | None]
"""Returns the arguments to train with a number of processes, or None if the config does not support it."""


class Supervisor:
    """Runs a job until it finishes.

    Args:
        pool: Hosts that train, and spare hosts.
        hosts: Number of hosts that train at once.
        limits: Limits on failures and stalls.
        journal: Journal of the run.
        reduce: See `Reduce`. Called if fewer processes than requested can train.
        processes_per_host: Trainer processes on each host.
        now: Returns the current time in seconds, for tests.
        notify: Prints one line to the user.
        slices: Number of TPU slices, for `MEGASCALE_*`.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        hosts: int,
        limits: Limits,
        journal: Journal,
        reduce: Reduce = lambda processes: None,
        processes_per_host: int = 1,
        slices: int = 1,
        now: Callable[[], float] = time.monotonic,
        notify: Callable[[str], None] = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True),
    ):
        self.pool, self.num_hosts, self.limits, self.journal = pool, hosts, limits, journal
        self.reduce, self.processes_per_host, self.slices = reduce, processes_per_host, slices
        self.now, self.notify = now, notify
        self.hosts = Hosts(pool.count, limits.host_deaths)
        self.tally = Tally(limits)
        self.job = uuid.uuid4().hex
        self.placement: list[Host] = []
        self.stop_signal: int | None = None
        self._stop_sent = False
        self.number = journal.attempts()

    def run(self) -> int:
        """Train until the run finishes.

        Returns:
            0, or 128 plus the number of the signal that stopped the run.

        Raises:
            RequestError: The trainers reject the request.
            WorkError: A budget is spent, or too few hosts are left. The message gives the reason.
        """
        try:
            return self._run_attempts()
        finally:
            self.journal.flush()

    def _run_attempts(self) -> int:
        while True:
            members, words = self._choose_hosts()
            if self.stop_signal is not None:
                return 128 + self.stop_signal
            attempt = self._start(members, words)
            death = self._watch(attempt)
            if death is None:
                self.journal.write("finished", attempt=attempt.number, reason=f"step {attempt.last_step}")
                return 0
            self._end(attempt, death)
            if self.stop_signal is not None:
                return 128 + self.stop_signal
            if death.kind == "request":
                raise RequestError(f"rank {death.rank} rejected the run: {death.reason}")
            reason = self.tally.count(death, attempt.start_step)
            if reason:
                self.journal.write("stopped", attempt=attempt.number, reason=reason)
                raise WorkError(f"{reason}\n    last: {self._describe(attempt, death)}\n    {self.tally.advice(death)}")

    def stop(self, number: int) -> None:
        """Ask the trainers to save and stop. A signal handler may call it."""
        self.stop_signal = number

    def _choose_hosts(self) -> tuple[list[Host], Sequence[str]]:
        """Wait for hosts. Return the hosts of the next attempt by rank, and arguments for the trainers."""
        for host in self.hosts.waiting():
            self.pool.call(host.number, "prepare")
        since = self.now()
        while self.stop_signal is None:
            ready = self.hosts.ready()
            if len(ready) >= self.num_hosts:
                return self.hosts.place(ready, self.placement, self.num_hosts), ()
            patient = self.now() - since < self.limits.host_seconds
            if not (patient and self.hosts.waiting()):
                # The first attempt always uses all requested hosts.
                fewer = self._find_fewer_hosts(len(ready)) if self.placement else None
                if fewer is not None:
                    return self.hosts.place(ready, self.placement, fewer[0]), fewer[1]
                if not self.hosts.waiting() or self.now() - since > 10 * self.limits.host_seconds:
                    reason = self._describe_shortage(ready)
                    self.journal.write("stopped", attempt=self.number, reason=reason.partition("\n")[0])
                    raise WorkError(reason)
            self._handle_events(None)
        return [], ()

    def _find_fewer_hosts(self, ready: int) -> tuple[int, Sequence[str]] | None:
        for hosts in range(min(ready, self.num_hosts - 1), 0, -1):
            words = self.reduce(hosts * self.processes_per_host)
            if words is not None:
                return hosts, words
        return None

    def _describe_shortage(self, ready: Sequence[Host]) -> str:
        lines = [f"{len(ready)} of {self.num_hosts} hosts are left, and the config does not support that few"]
        lines += [f"    {host.name}: {host.condition}" for host in self.hosts.all if host.condition != "ready"]
        return "\n".join(
            [*lines, "    fix: add --spares, or use a mesh with a data axis that can shrink (mesh.shape.data=-1)"]
        )

    def _start(self, members: Sequence[Host], words: Sequence[str]) -> Attempt:
        self.number += 1
        processes = len(members) * self.processes_per_host
        for index, host in enumerate(members):
            before = self.placement[index] if index < len(self.placement) else None
            if before is not None and before is not host:
                reason = f"replaces {before.name}: {before.last_reason or 'moved'}"
                self.journal.write(
                    "replaced", attempt=self.number, rank=index * self.processes_per_host, host=host.name, reason=reason
                )
                self.notify(f"{host.name} {reason}")
        if len(members) < self.num_hosts:
            reason = f"training with {len(members)} of {self.num_hosts} hosts and the same global batch"
            self.journal.write("reduced", attempt=self.number, reason=reason)
            self.notify(reason)
        self.placement = list(members)
        ranks: dict[int, _Rank] = {}
        try:
            coordinator = self.pool.ask(members[0].number, "coordinator", members[0].address)
        except HostLostError:
            coordinator = ""  # the `lost` event will end this attempt
        for index, host in enumerate(members):
            local_ranks = range(index * self.processes_per_host, (index + 1) * self.processes_per_host)
            environments = {rank: self._environment(coordinator, processes, rank) for rank in local_ranks}
            for rank in local_ranks:
                ranks[rank] = _Rank(host=host, last_event=self.now())
            host.begin()
            self.pool.call(host.number, "start", self.number, environments, tuple(words))
        return Attempt(number=self.number, ranks=ranks)

    def _environment(self, coordinator: str, processes: int, rank: int) -> dict[str, str]:
        slices = None
        if self.slices > 1:
            each = processes // self.slices
            slices = {"MEGASCALE_NUM_SLICES": str(self.slices), "MEGASCALE_SLICE_ID": str(rank // each)}
        return attempt_environment(job=self.job, coordinator=coordinator, processes=processes, rank=rank, slices=slices)

    def _watch(self, attempt: Attempt) -> Death | None:
        """Wait until the attempt is over. Return the root cause of its end, or None if it finished."""
        deaths: list[Death] = []
        deadline: float | None = None
        while True:
            new = self._handle_events(attempt)
            deaths += new
            self._report_deaths(attempt, new)
            if death := self._frozen(attempt):
                return death
            if all(rank.finished for rank in attempt.ranks.values()):
                return None
            if deaths:
                cause = root_cause(deaths)
                assert cause is not None
                if cause.kind not in ("peer", "preempted"):
                    return cause
                # A process that lost a peer may be reported before that peer. A process that saves after SIGTERM needs time.
                if deadline is None:
                    peer = cause.kind == "peer"
                    deadline = self.now() + (self.limits.settle_seconds if peer else self.limits.grace_seconds)
                if self.now() >= deadline or len(deaths) == len(attempt.ranks):
                    return cause

    def _handle_events(self, attempt: Attempt | None) -> list[Death]:
        """Handle new events. Return the deaths among the ranks of the attempt."""
        deaths: list[Death] = []
        if self.stop_signal is not None and not self._stop_sent:
            self._stop_sent = True
            self.notify(f"{signal.Signals(self.stop_signal).name}: the trainers will save and stop")
            for host in self.placement:
                self.pool.call(host.number, "signal", signal.SIGTERM)
        for number, event in self.pool.wait(self.limits.look_seconds):
            host = self.hosts.all[number]
            handler = getattr(self, f"_on_{event['event']}", None)
            if handler is None:
                continue
            deaths += handler(host, attempt, event) or ()
        self.journal.flush(now=bool(deaths))
        return deaths

    def _on_ready(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> None:
        host.mark_ready()

    def _on_host(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> None:
        host.set_agent(event["name"], event["address"])
        self.pool.call(host.number, "prepare")

    def _on_output(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> None:
        sys.stderr.write(event["text"])
        sys.stderr.flush()

    def _on_cold(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> None:
        """Record a failure of the host, because a warm process died before it was assigned a rank."""
        lines = [line for line in event["message"].splitlines() if line.strip()]
        reason = f"a process cannot start on the host: {lines[-1] if lines else event['code']}"
        self._record_failure(host, reason)
        if not host.excluded:
            self.pool.call(host.number, "prepare")

    def _on_started(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> None:
        rank = self._rank(attempt, event)
        if rank is not None:
            rank.pid, rank.last_event = event["pid"], self.now()
            self.journal.write(
                "started", attempt=event["attempt"], rank=event["rank"], host=host.name, pid=event["pid"]
            )

    def _on_progress(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> list[Death]:
        rank = self._rank(attempt, event)
        if rank is None or attempt is None:
            return []
        attempt.num_stepping += rank.steps == 0 < event["steps"]
        rank.phase, rank.step, rank.steps = event["phase"], event["step"], event["steps"]
        rank.silent, rank.last_event = event["silent"], self.now()
        if rank.phase in ("compile", "input", "step") and attempt.start_step is None:
            attempt.start_step = rank.step - rank.steps
        attempt.last_step = max(attempt.last_step, rank.step)
        if attempt.num_stepping == len(attempt.ranks) and not attempt.has_stepped:
            attempt.has_stepped = True
            reason = f"from step {attempt.start_step}"
            self.journal.write("stepping", attempt=attempt.number, reason=reason)
            for other in self.hosts.all:
                if not other.excluded:
                    self.pool.call(other.number, "prepare")  # warm processes for the next attempt
        if event["stopped"] >= self.limits.freeze_seconds:
            reason = f"stopped by a signal for {event['stopped']:.0f} s"
            self.journal.write(
                "frozen", attempt=attempt.number, rank=event["rank"], host=host.name, pid=rank.pid, reason=reason
            )
            return [Death(rank=event["rank"], kind="infrastructure", reason=f"frozen: {reason}", host_at_fault=True)]
        return []

    def _on_exited(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> list[Death]:
        rank = self._rank(attempt, event)
        if rank is None:
            return []
        kind, reason = event["kind"], event["reason"]
        if kind == "finished":
            rank.finished = True
        self.journal.write(
            "exited", attempt=event["attempt"], rank=event["rank"], host=host.name, pid=rank.pid, reason=reason
        )
        if kind == "finished":
            return []
        return [Death(rank=event["rank"], kind=kind, reason=reason, host_at_fault=kind == "infrastructure")]

    def _on_lost(self, host: Host, attempt: Attempt | None, event: Mapping[str, Any]) -> list[Death]:
        if not host.present:  # a requested new agent is lost too: the engine may have placed it on the failed machine
            if not host.excluded:
                self.pool.revive(host.number)
            return []
        host.mark_lost(event["reason"])
        ranks = [n for n, r in attempt.ranks.items() if r.host is host and not r.finished] if attempt else []
        first = self.placement.index(host) * self.processes_per_host if host in self.placement else None
        self.journal.write("lost", attempt=self.number, rank=first, host=host.name, reason=event["reason"])
        if not host.excluded:
            self.pool.revive(host.number)
        reason = f"its host was lost: {event['reason']}"
        return [Death(rank=n, kind="infrastructure", reason=reason, host_at_fault=True) for n in ranks]

    @staticmethod
    def _rank(attempt: Attempt | None, event: Mapping[str, Any]) -> _Rank | None:
        return attempt.ranks.get(event["rank"]) if attempt and event["attempt"] == attempt.number else None

    def _frozen(self, attempt: Attempt) -> Death | None:
        """Return the death of the rank that is furthest behind if ranks exceed the limits of their phases, or None.

        Events arrive much more often than limits change, so this looks at all ranks only once per `look_seconds`.
        """
        if self.now() - attempt.checked < self.limits.look_seconds:
            return None
        attempt.checked = self.now()
        live = {n: r for n, r in attempt.ranks.items() if not r.finished}
        silences = {n: r.silent + self.now() - r.last_event for n, r in live.items()}
        late = {n for n, r in live.items() if silences[n] > self.limits.phase_limit(r.phase, r.steps)}
        # Ranks that have saved wait in their next step for ranks that are still saving, whose limit is longer.
        saving = [r.step for n, r in live.items() if r.phase == "save" and n not in late]
        over = {n for n in late if not any(step <= live[n].step for step in saving)}
        if not over:
            return None
        # Waiting ranks are in the same step or one step ahead. A rank that is alone in its phase delays them.
        last = min(over, key=lambda n: (live[n].step, -silences[n]))
        is_only_rank = sum((r.step, r.phase) == (live[last].step, live[last].phase) for r in live.values()) == 1
        rank = live[last]
        reason = f"no progress for {silences[last]:.0f} s in the phase {rank.phase!r} of step {rank.step}"
        self.journal.write(
            "frozen", attempt=attempt.number, rank=last, host=rank.host.name, pid=rank.pid, reason=reason
        )
        return Death(rank=last, kind="stalled", reason=reason, host_at_fault=is_only_rank and len(live) > 1)

    def _end(self, attempt: Attempt, death: Death) -> None:
        """End the remaining processes of an attempt, and count the death."""
        if death.host_at_fault:
            self._record_failure(attempt.ranks[death.rank].host, death.reason)
        hosts = list({id(r.host): r.host for r in attempt.ranks.values()}.values())
        for host, ranks in self._kill(hosts):
            for rank in ranks:
                self.journal.write(
                    "killed",
                    attempt=attempt.number,
                    rank=rank,
                    host=host.name,
                    pid=attempt.ranks[rank].pid,
                    reason=f"rank {death.rank} ended: {death.reason}",
                )
        for host in hosts:
            host.end()

    def _kill(self, hosts: Sequence[Host]) -> list[tuple[Host, list[int]]]:
        """Kill all trainers in parallel. Return the ranks that were alive."""
        killed = self.pool.ask_all([h.number for h in hosts if h.present], "kill")
        return [(self.hosts.all[number], ranks) for number, ranks in killed.items()]

    def _record_failure(self, host: Host, reason: str) -> None:
        if host.record_death(reason):
            self.journal.write("set-aside", attempt=self.number, host=host.name, reason=host.condition)
            self.notify(f"{host.name} is {host.condition}")

    def _report_deaths(self, attempt: Attempt, deaths: Sequence[Death]) -> None:
        """Report deaths that arrived together, the most likely causes first."""
        for death in sorted(deaths, key=severity)[:REPORTED]:
            self.notify(self._describe(attempt, death))
        if len(deaths) > REPORTED:
            self.notify(f"{len(deaths) - REPORTED} more ranks ended; {PROCESSES} lists them")

    @staticmethod
    def _describe(attempt: Attempt, death: Death) -> str:
        rank = attempt.ranks[death.rank]
        return f"attempt {attempt.number}: rank {death.rank} on {rank.host.name} (process {rank.pid}): {death.reason}"
