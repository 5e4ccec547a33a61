"""A simulation of training with failures: the time in kept steps, and the use of the other time."""

import heapq
import math
import random
from collections.abc import Mapping

import attrs

DAY = 86400.0


@attrs.frozen(kw_only=True)
class Tier:
    """A kind of checkpoint.

    Attributes:
        every: Seconds of training between two saves.
        blocks: Seconds that a save blocks training.
        durable: Seconds from the start of a save until it can be restored.
        restore: Seconds to read a checkpoint and distribute it to the hosts.
    """

    every: float
    blocks: float
    durable: float
    restore: float


@attrs.frozen(kw_only=True)
class Recovery:
    """Time between a failure and the next step, in addition to the restore.

    Attributes:
        detect: Seconds until a dead process is detected.
        hang: Seconds until a hang is detected.
        hang_share: Share of failures that are hangs.
        swap: Seconds to replace a host by a spare.
        restart: Seconds to restart processes without a swap.
        compile: Seconds to load or compile the step.
    """

    detect: float
    hang: float
    hang_share: float
    swap: float
    restart: float
    compile: float


@attrs.frozen(kw_only=True)
class Cluster:
    """Failure rates and replacements.

    Attributes:
        failures_per_day: Failures of the whole job per day.
        hardware_share: Share of failures after which a host is repaired. The other failures restart on the same hosts.
        spares: Number of spare hosts.
        repair: Mean seconds to repair a host.
    """

    failures_per_day: float
    hardware_share: float = 0.0
    spares: int = 0
    repair: float = DAY


@attrs.frozen(kw_only=True)
class Outcome:
    """Seconds by phase. Their sum is the simulated time."""

    seconds: Mapping[str, float]
    failures: int

    @property
    def goodput(self) -> float:
        """Share of time spent on kept steps."""
        return self.seconds["productive"] / sum(self.seconds.values())


PHASES = ("productive", "save", "lost", "detect", "no spare", "swap", "restart", "restore", "compile")


class Simulation:
    """One job over a number of days.

    Args:
        cluster: Failure rates and replacements.
        recovery: Duration of a recovery.
        persistent: Tier that survives every failure.
        local: Tier of checkpoints on the hosts, or None.
        local_lost: Share of failures that leave no usable local checkpoint.
        seed: Seed of the random numbers.
    """

    def __init__(
        self,
        cluster: Cluster,
        recovery: Recovery,
        persistent: Tier,
        local: Tier | None = None,
        *,
        local_lost: float = 0.0,
        seed: int = 0,
    ):
        self.cluster, self.recovery, self.persistent, self.local = cluster, recovery, persistent, local
        self.local_lost = local_lost
        self.random = random.Random(seed)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.failures = 0
        self.now = 0.0
        self._repairs: list[float] = []  # time when each host is repaired

    def run(self, days: float) -> Outcome:
        """Simulate a number of days."""
        end = days * DAY
        while self.now < end:
            self._train_until(self._next_failure())
            self._recover()
        return Outcome(seconds=self.seconds, failures=self.failures)

    def _next_failure(self) -> float:
        return self.random.expovariate(self.cluster.failures_per_day / DAY)

    def _train_until(self, length: float) -> None:
        """Train for `length` seconds until a failure. Saves happen at their intervals of training time."""
        saves = [(self.persistent, "persistent")] + ([(self.local, "local")] if self.local else [])
        newest = {name: 0.0 for _, name in saves}
        pending: list[tuple[float, str, float]] = []  # (time when durable, tier, progress)
        due = {name: tier.every for tier, name in saves}
        progress = clock = 0.0
        while True:
            step = min(due.values()) - progress
            if clock + step >= length:
                progress += length - clock
                break
            clock, progress = clock + step, progress + step
            stopped = False
            for tier, name in saves:
                if due[name] > progress + 1e-9:
                    continue
                due[name] = progress + tier.every
                pending.append((clock + tier.durable, name, progress))
                blocked = min(tier.blocks, length - clock)
                clock, stopped = clock + blocked, blocked < tier.blocks
                self.seconds["save"] += blocked
                if stopped:
                    break
            if stopped:
                break
        for when, name, at in pending:
            if when <= length:
                newest[name] = max(newest[name], at)
        self._tier = self.persistent
        newest_step = newest["persistent"]
        if self.local and self.random.random() >= self.local_lost and newest["local"] >= newest_step:
            self._tier, newest_step = self.local, newest["local"]
        self.seconds["productive"] += newest_step
        self.seconds["lost"] += progress - newest_step
        self.now += length
        self.failures += 1

    def _recover(self) -> None:
        """Simulate a failure until the next step.

        A failure during the recovery restarts it. A job that waits for a host does not fail.
        """
        while True:
            phases = self._phases()
            waited = phases.pop("no spare", 0.0)
            self.seconds["no spare"] += waited
            self.now += waited
            length = sum(phases.values())
            remaining = self._next_failure()
            for name, seconds in phases.items():
                spent = min(seconds, remaining)
                self.seconds[name] += spent
                self.now += spent
                remaining -= spent
            if length and remaining <= 0:
                self.failures += 1
                continue
            return

    def _phases(self) -> dict[str, float]:
        recovery, draw = self.recovery, self.random.random
        phases = {"detect": recovery.hang if draw() < recovery.hang_share else recovery.detect}
        if draw() < self.cluster.hardware_share:
            phases["no spare"] = self._take_spare()
            phases["swap"] = recovery.swap
        else:
            phases["restart"] = recovery.restart
        return phases | {"restore": self._tier.restore, "compile": recovery.compile}

    def _take_spare(self) -> float:
        """Return the seconds until a host replaces the failed one, which goes to repair."""
        while self._repairs and self._repairs[0] <= self.now:
            heapq.heappop(self._repairs)
        wait = 0.0
        if len(self._repairs) >= self.cluster.spares:
            heapq.heappush(self._repairs, self.now + self.random.expovariate(1 / self.cluster.repair))
            wait = max(0.0, heapq.heappop(self._repairs) - self.now)
        else:
            heapq.heappush(self._repairs, self.now + self.random.expovariate(1 / self.cluster.repair))
        return wait


def daly_goodput(interval: float, save: float, recovery: float, mean_time_between_failures: float) -> float:
    """Return the exact expected goodput of one tier under exponential failures.

    Failures can also occur during saves and recoveries.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equation
    13: the expected time of a segment of `interval` seconds of work is M exp(R / M) (exp((T + C) / M) - 1).
    """
    m = mean_time_between_failures
    return interval / (m * math.exp(recovery / m) * math.expm1((interval + save) / m))


def young_interval(save: float, mean_time_between_failures: float) -> float:
    """Return the optimal interval between saves, to first order: sqrt(2 C M) (J. W. Young, CACM 17 (1974))."""
    return math.sqrt(2 * save * mean_time_between_failures)
