"""Inject faults into training jobs. A seed determines the plan, and a plan prints as one line that can be replayed.

    plan = Chaos(seed=7).plan(kinds=("kill", "stop"), ranks=4, steps=(5, 40), count=3)
    print(plan)                       # chaos seed=7: kill@8:rank=2 stop@23:rank=0,seconds=2.31 kill@31:rank=1
    for event in plan.play(Target(processes=pids, step=newest_step)):
        print(event)
    FaultPlan.parse("chaos seed=7: kill@8:rank=2 ...")      # the same faults again

Works on Linux. `cut` needs a `TcpLink` between the processes, or root and a network namespace per process.
"""

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_testing.links import FaultyStorage, HttpFaults, TcpLink

__all__ = [
    "KINDS", "Chaos", "ChaosError", "Fault", "FaultPlan", "FaultyStorage", "HttpFaults", "Target", "TcpLink", "corrupt_file",
    "cut", "fill", "inject", "kill", "play_in_thread", "slow", "stop",
]  # fmt: skip

KINDS = ("kill", "stop", "slow", "corrupt", "fill", "cut")
"""
kill     Send SIGKILL.
stop     Send SIGSTOP, then SIGCONT after some seconds.
slow     Let the process run only a tenth of the time, for some seconds.
corrupt  Flip one bit of one file.
fill     Stop the process's files from growing beyond a given size, for some seconds.
cut      Disconnect the network, for some seconds.
"""
_SECONDS = (0.5, 4.0)
_TICK = 0.02


@attrs.frozen
class Fault:
    """A single fault.

    Attributes:
        kind: One of `KINDS`.
        step: Number of finished steps at which the fault is injected.
        rank: Rank of the process.
        seconds: Duration, for kinds of faults that end.
        number: Selects the file and the bit to flip, or gives the number of bytes that still fit.
    """

    kind: str
    step: int
    rank: int
    seconds: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        details = f"rank={self.rank}"
        details += f",seconds={self.seconds:g}" if self.seconds else ""
        details += f",number={self.number}" if self.number else ""
        return f"{self.kind}@{self.step}:{details}"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parse the output of `str`. Raises `ValueError`."""
        match = re.fullmatch(r"(\w+)@(\d+):rank=(\d+)(?:,seconds=([\d.]+))?(?:,number=(\d+))?", text)
        if match is None or match[1] not in KINDS:
            raise ValueError(
                f"{text!r} is not a fault\n    expected: KIND@STEP:rank=N[,seconds=S][,number=N], with KIND one of "
                f"{', '.join(KINDS)}"
            )
        return cls(match[1], int(match[2]), int(match[3]), float(match[4] or 0), int(match[5] or 0))


@attrs.frozen(kw_only=True)
class Target:
    """The job that faults are injected into.

    Attributes:
        processes: Rank -> process ID, or a function that returns this mapping, for jobs that restart.
        step: Function that returns the number of finished steps.
        directory: Directory from which `corrupt` selects files.
        pattern: Glob pattern of those files.
        links: Rank -> network link of the process. `cut` uses the network namespace of a process without a link.
    """

    processes: Mapping[int, int] | Callable[[], Mapping[int, int]]
    step: Callable[[], int] = lambda: 0
    directory: Path | None = None
    pattern: str = "**/*.bin"
    links: Mapping[int, TcpLink] = attrs.field(factory=dict)

    def pid(self, rank: int) -> int | None:
        """Return the process ID of a rank, or None if the rank currently has no process."""
        return (self.processes() if callable(self.processes) else self.processes).get(rank)


@attrs.frozen
class FaultPlan:
    """Faults, ordered by step."""

    seed: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"chaos seed={self.seed}: {' '.join(map(str, self.faults))}"

    @classmethod
    def parse(cls, line: str) -> "FaultPlan":
        """Parse a plan from a line, which may contain other text. Raises `ValueError`."""
        match = re.search(r"chaos seed=(\d+):((?: \S+@\S+)*)", line)
        if match is None:
            raise ValueError(f"{line!r} has no plan\n    expected: chaos seed=N: FAULT FAULT ...")
        return cls(int(match[1]), tuple(map(Fault.parse, match[2].split())))

    def play(self, target: Target, *, seconds: float = 600.0) -> Iterator[str]:
        """Inject each fault when the job reaches the fault's step. Yield a description of each, for a log.

        A fault with a duration ends before the next one begins.

        Args:
            target: Job to inject the faults into.
            seconds: Time limit.

        Raises:
            TimeoutError: If the job does not reach a step in time.
            ChaosError: If a fault cannot be injected on this machine.
        """
        deadline = time.monotonic() + seconds
        for fault in self.faults:
            while target.step() < fault.step or (fault.kind != "corrupt" and target.pid(fault.rank) is None):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{fault}: the job is at step {target.step()} after {seconds:g} s")
                time.sleep(_TICK)
            yield f"{fault}: {inject(fault, target)}"


class ChaosError(Exception):
    """A fault cannot be injected on this machine."""


class Chaos:
    """Plans random faults. The same seed always gives the same plan."""

    def __init__(self, seed: int):
        self.seed, self._dice = seed, random.Random(seed)

    def plan(
        self, *, kinds: Sequence[str] = ("kill",), ranks: int = 1, steps: tuple[int, int], count: int
    ) -> FaultPlan:
        """Plan `count` faults of the given kinds, for random processes of `ranks`, at steps from `steps[0]` to `steps[1]`.

        Raises:
            ValueError: If a kind is unknown.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"unknown kinds of faults: {', '.join(sorted(unknown))}\n    known: {', '.join(KINDS)}")
        faults = [
            Fault(
                kind,
                self._dice.randint(*steps),
                self._dice.randrange(ranks),
                0.0 if kind in ("kill", "corrupt") else round(self._dice.uniform(*_SECONDS), 2),
                self._dice.randrange(1, 2**20) if kind in ("corrupt", "fill") else 0,
            )
            for kind in self._dice.choices(kinds, k=count)
        ]
        return FaultPlan(self.seed, tuple(sorted(faults, key=lambda f: f.step)))


def inject(fault: Fault, target: Target) -> str:
    """Inject one fault now. Return a description of what happened.

    Raises:
        ChaosError: If the fault cannot be injected on this machine.
    """
    if fault.kind == "corrupt":
        if target.directory is None:
            raise ChaosError("`corrupt` needs a Target with a directory")
        return corrupt_file(target.directory, fault.number, target.pattern)
    if fault.kind == "cut" and fault.rank in target.links:
        with target.links[fault.rank].down():
            time.sleep(fault.seconds)
        return f"its network was down for {fault.seconds:g} s"
    pid = target.pid(fault.rank)
    if pid is None:
        return "it has no process"
    actions: Mapping[str, Callable[[], str]] = {
        "kill": lambda: kill(pid),
        "stop": lambda: stop(pid, fault.seconds),
        "slow": lambda: slow(pid, fault.seconds),
        "fill": lambda: fill(pid, fault.number, fault.seconds),
        "cut": lambda: cut(pid, fault.seconds),
    }
    try:
        return actions[fault.kind]()
    except ProcessLookupError:
        return f"process {pid} was gone"


def kill(pid: int) -> str:
    """Kill a process with SIGKILL."""
    os.kill(pid, signal.SIGKILL)
    return f"process {pid} was killed"


def stop(pid: int, seconds: float) -> str:
    """Suspend a process for a number of seconds."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return f"process {pid} was stopped for {seconds:g} s"


def slow(pid: int, seconds: float, share: float = 0.1) -> str:
    """Let a process run for only a fraction of the time."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_TICK * (1 - share) / share)
            os.kill(pid, signal.SIGCONT)
            time.sleep(_TICK)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return f"process {pid} ran {share:.0%} of {seconds:g} s"


def corrupt_file(directory: Path, number: int, pattern: str = "**/*") -> str:
    """Flip one bit of one file. `number` selects the file, among those that match `pattern`, and the bit.

    Raises:
        ChaosError: If no file matches.
    """
    files = sorted(p for p in directory.glob(pattern) if p.is_file() and p.stat().st_size)
    if not files:
        raise ChaosError(f"no file in {directory} matches {pattern}")
    path = files[number % len(files)]
    bit = number % (8 * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << (bit % 8))]))
    return f"flipped bit {bit} of {path.relative_to(directory)}"


def fill(pid: int, limit: int, seconds: float) -> str:
    """Stop the files of a process from growing beyond `limit` bytes for a number of seconds.

    Writes fail with EFBIG; on a full disk, they would fail with ENOSPC. To test a disk that is really full, use
    `mount -t tmpfs -o size=...`, which needs root.
    """
    try:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, before[1]))
    except PermissionError as error:
        raise ChaosError(f"cannot set the limits of process {pid}: {error.strerror}") from error
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    return f"files of process {pid} could not grow beyond {limit} bytes for {seconds:g} s"


def cut(pid: int, seconds: float) -> str:
    """Disconnect the network of a process that has its own network namespace.

    Raises:
        ChaosError: If it shares the network of this process, or if this process is not root. A `TcpLink` works in both cases.
    """
    if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        raise ChaosError(
            f"cannot cut the network of process {pid}: it shares the network of this process\n"
            "    fix: start it with `unshare --net`, or route its connections through a TcpLink"
        )
    enter = ["nsenter", "--target", str(pid), "--net", "ip"]
    try:
        links = subprocess.run([*enter, "-o", "link"], check=True, capture_output=True, text=True).stdout
        names = [line.split(":")[1].strip().partition("@")[0] for line in links.splitlines()]
        for state in ("down", "up"):
            for name in names:
                subprocess.run([*enter, "link", "set", name, state], check=True, capture_output=True)
            if state == "down":
                time.sleep(seconds)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ChaosError(f"`{' '.join(enter)}` failed: it needs root, nsenter and ip") from error
    return f"the network of process {pid} was down for {seconds:g} s"


def play_in_thread(plan: FaultPlan, target: Target, events: list[str], **options: Any) -> threading.Thread:
    """Play a plan in a background thread. Descriptions of what happened are appended to `events`."""

    def play() -> None:
        try:
            events.extend(plan.play(target, **options))
        except (ChaosError, TimeoutError) as error:
            events.append(f"not done: {error}")

    thread = threading.Thread(target=play, name="chaos", daemon=True)
    thread.start()
    return thread
