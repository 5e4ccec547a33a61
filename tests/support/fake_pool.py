"""Fake hosts that follow a script, with a clock that advances only while a test waits."""

import itertools
from datetime import UTC, datetime, timedelta

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_plugins_runtime.launch.failure_limits import Limits
from axlearn_plugins_runtime.launch.journal import Journal
from axlearn_plugins_runtime.launch.pool import HostLostError
from axlearn_plugins_runtime.launch.supervisor import Supervisor

PIDS = itertools.count(1000)


class FakePool:
    """A pool whose ranks step by themselves until the script of their attempt ends one of them.

    Args:
        count: hosts.
        script: attempt -> events of the ranks, (rank, event); a rank that is in no event finishes.
        saved: the step that each attempt restores.
    """

    def __init__(self, count, script=None, *, saved=lambda attempt: 10 * (attempt - 1), broken=()):
        self.count, self.script, self.saved = count, script or {}, saved
        self.clock = 0.0
        self.queue = [(n, {"event": "host", "name": f"node-{n}", "address": f"10.0.0.{n}"}) for n in range(count)]
        self.running = {}  # host -> ranks
        self.starts = []  # (attempt, {rank: host}, words)
        self.environments = []
        self.revived, self.signals = [], []
        self.broken = set(broken)  # hosts that never come (back)

    def now(self):
        return self.clock

    def call(self, host, method, *args):
        if method == "prepare" and host not in self.broken:
            self.queue.append((host, {"event": "ready", "pids": [1]}))
        elif method == "signal":
            self.signals.append((host, args[0]))
        elif method == "start":
            attempt, environments, words = args
            if not self.starts or self.starts[-1][0] != attempt:
                self.starts.append((attempt, {}, words))
            self.running[host] = list(environments)
            for rank, environment in environments.items():
                self.environments.append(environment)
                self.starts[-1][1][rank] = host
                self.queue.append((host, {"event": "started", "attempt": attempt, "rank": rank, "pid": next(PIDS)}))
                self._progress(host, attempt, rank, "compile", 0)
            if len(self.starts[-1][1]) == int(next(iter(environments.values()))["JAX_NUM_PROCESSES"]):
                self._play(attempt)

    def ask(self, host, method, *args):
        if host in self.broken:
            raise HostLostError(f"host {host} is lost")
        if method == "coordinator":
            return f"{args[0]}:{4000 + len(self.starts)}"
        assert method == "kill"
        return sorted(self.running.pop(host, []))

    def ask_all(self, hosts, method, *args):
        return {host: self.ask(host, method, *args) for host in hosts if host not in self.broken}

    def wait(self, timeout):
        self.clock += 0.01 if self.queue else timeout
        events, self.queue = self.queue, []
        return events

    def revive(self, host):
        self.revived.append(host)
        if host not in self.broken:
            self.queue.append((host, {"event": "host", "name": f"node-{host}", "address": f"10.0.0.{host}"}))

    def close(self):
        pass

    def _progress(self, host, attempt, rank, phase, steps, silent=0.0, stopped=0.0, **_):
        event = {"event": "progress", "attempt": attempt, "rank": rank, "phase": phase, "steps": steps}
        self.queue.append((host, {**event, "step": self.saved(attempt) + steps, "silent": silent, "stopped": stopped}))

    def _play(self, attempt):
        ranks = self.starts[-1][1]
        for rank, host in ranks.items():
            self._progress(host, attempt, rank, "step", 1)
        events = self.script.get(attempt, [(rank, {"event": "exited", "kind": "finished"}) for rank in ranks])
        for rank, event in events:
            if event["event"] == "progress":
                self._progress(ranks[rank], attempt, rank, **{"phase": "step", "steps": 1, **event})
                continue
            if event["event"] == "lost":
                self.broken |= {ranks[rank]} if event.get("for_good") else set()
            whole = {"attempt": attempt, "rank": rank, "reason": event.get("kind", ""), "code": 1, **event}
            self.queue.append((ranks[rank], whole))


def killed(rank, kind="infrastructure", reason="killed by SIGKILL"):
    return rank, {"event": "exited", "kind": kind, "reason": reason}


def lost(rank, *, for_good=False):
    return rank, {"event": "lost", "reason": "the node died", "for_good": for_good}


def supervisor(tmp_path, pool, hosts, *, reduce=lambda processes: None, processes_per_host=1, slices=1, **limits):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    journal = Journal(LocalStorage(tmp_path), now=lambda: start + timedelta(seconds=pool.clock))
    lines = []
    instance = Supervisor(
        pool,
        hosts=hosts,
        limits=Limits(**limits),
        journal=journal,
        reduce=reduce,
        processes_per_host=processes_per_host,
        slices=slices,
        now=pool.now,
        notify=lines.append,
    )
    instance.lines = lines
    return instance
