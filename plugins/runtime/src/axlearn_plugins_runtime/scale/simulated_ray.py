"""The part of Ray that a launcher uses, with agents that only exist as timed events in this process."""

import contextlib
import heapq
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs

LATENCY, SLOW = 0.002, 1.0
"""Seconds of a message to an agent (assumed), and of one to a host with a slow network."""
WARM_SECONDS, COMPILE_SECONDS, STEP_SECONDS, REPORT_SECONDS, KILL_SECONDS = 2.0, 5.0, 1.0, 1.0, 0.2
"""Seconds until a process is ready, until its first step, of a step, between reports, and to kill a process (assumed)."""
REVIVE_SECONDS = 10.0
"""Seconds until Ray has started an agent in place of a lost one (assumed)."""


class ActorLostError(Exception):
    """An actor is gone. Stands for `ray.exceptions.RayActorError`."""


class TimedOutError(Exception):
    """A result is not there in time. Stands for `ray.exceptions.GetTimeoutError`."""


class Clock:
    """A clock that runs with real time, but not while the cluster is simulated, and that skips the time in which nothing happens.

    Attributes:
        skipped: Seconds that were skipped.
    """

    def __init__(self) -> None:
        self.skipped = 0.0
        self._simulating: float | None = None
        self._simulated = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Return the seconds since an arbitrary time."""
        real = time.perf_counter() if self._simulating is None else self._simulating
        return real - self._simulated + self.skipped

    @contextlib.contextmanager
    def simulating(self) -> Iterator[None]:
        """Stop the clock, except for `skip`."""
        if self._simulating is not None:
            yield
            return
        self._simulating = begun = time.perf_counter()
        try:
            yield
        finally:
            self._simulated += time.perf_counter() - begun
            self._simulating = None

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function in some seconds."""
        heapq.heappush(self._due, (self.now() + seconds, next(self._order), call))

    def run_due(self) -> None:
        """Call all functions that are due."""
        while self._due and self._due[0][0] <= self.now():
            heapq.heappop(self._due)[2]()

    def skip(self, end: float) -> None:
        """Go to the next event, or to `end` if that is earlier."""
        then = min(end, self._due[0][0]) if self._due else end
        self.skipped += max(0.0, then - self.now())


@attrs.define(eq=False)
class Reference:
    """A reference to a result.

    Attributes:
        done: Whether there is a result or an error.
        arrivals: Receives the reference when it is done, if someone waits for it.
    """

    done: bool = False
    value: Any = None
    error: Exception | None = None
    arrivals: "list[Reference] | None" = None

    def finish(self, value: Any = None, error: Exception | None = None) -> None:
        """Set the result or the error."""
        self.done, self.value, self.error = True, value, error
        if self.arrivals is not None:
            self.arrivals.append(self)


@attrs.define(eq=False)
class SimulatedAgent:
    """The agent of a host. See `axlearn_plugins_runtime.launch.agent.Agent`.

    Attributes:
        number: Number of the host.
        latency: Seconds of a message to it.
        alive: Whether its host exists.
        running: Attempt and ranks of its processes.
    """

    cluster: "SimulatedRay"
    number: int
    latency: float = LATENCY
    alive: bool = True
    running: tuple[int, tuple[int, ...]] = (0, ())
    _events: list[dict[str, Any]] = attrs.field(factory=list)
    _polls: list[Reference] = attrs.field(factory=list)
    _references: dict[int, Reference] = attrs.field(factory=dict)

    def call(self, method: str, args: tuple[Any, ...]) -> Reference:
        """Call a method of the agent."""
        reference = Reference()
        if not self.alive:
            self._fail(reference)
            return reference
        self._references[id(reference)] = reference
        self.cluster.clock.after(self.latency, lambda: self._run(method, args, reference))
        return reference

    def lose(self) -> None:
        """End the host. Ray notices at once."""
        self.alive = False
        for reference in list(self._references.values()):
            self._fail(reference)
        self._references.clear()

    def report(self, **event: Any) -> None:
        """Report an event to whoever polls the agent."""
        self._events.append(event)
        while self._polls and self._events:
            self._finish(self._polls.pop(0), self._take_events())

    def exit_ranks(self, kind: str, reason: str) -> None:
        """End the processes of the host."""
        attempt, ranks = self.running
        self.running = (attempt, ())
        for rank in ranks:
            self.report(event="exited", attempt=attempt, rank=rank, kind=kind, reason=reason, code=1)

    def _take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def _fail(self, reference: Reference) -> None:
        reference.finish(error=ActorLostError("the node died"))

    def _finish(self, reference: Reference, value: Any) -> None:
        if self.alive:
            reference.finish(value)
            self._references.pop(id(reference), None)

    def _run(self, method: str, args: tuple[Any, ...], reference: Reference) -> None:
        if not self.alive:
            return
        if method == "events":
            if self._events:
                self._finish(reference, self._take_events())
            else:
                self._polls.append(reference)
                self.cluster.clock.after(args[0], lambda: self._end_poll(reference))
        elif method == "kill":
            ranks, self.running = self.running[1], (self.running[0], ())
            self.cluster.clock.after(KILL_SECONDS, lambda: self._finish(reference, list(ranks)))
        elif method == "prepare":
            self._finish(reference, None)
            self.cluster.clock.after(WARM_SECONDS, lambda: self.report(event="ready", pids=[self.number]))
        else:
            answers = {
                "describe": {"host": f"node-{self.number}", "address": "10.0.0.1", "pid": self.number},
                "coordinator": "10.0.0.1:24576",
            }
            self._finish(reference, answers.get(method))
            if method == "start":
                self._start(*args)

    def _end_poll(self, reference: Reference) -> None:
        if reference in self._polls:
            self._polls.remove(reference)
            self._finish(reference, [])

    def _start(self, attempt: int, ranks: Mapping[int, Any], words: Sequence[str]) -> None:
        self.running = (attempt, tuple(ranks))
        for rank in ranks:
            self.report(event="started", attempt=attempt, rank=rank, pid=self.number)
        self._progress(attempt, self.cluster.clock.now())

    def _progress(self, attempt: int, begun: float) -> None:
        if not self.alive or self.running[0] != attempt:
            return
        steps = max(0, int((self.cluster.clock.now() - begun - COMPILE_SECONDS) / STEP_SECONDS))
        for rank in self.running[1]:
            phase = "step" if steps else "compile"
            self.report(
                event="progress", attempt=attempt, rank=rank, phase=phase, step=10 * attempt + steps, steps=steps,
                silent=0.0, stopped=0.0,
            )  # fmt: skip
        if self.running[1]:
            self.cluster.clock.after(REPORT_SECONDS, lambda: self._progress(attempt, begun))


class SimulatedRay:
    """Stands for the module `ray`, connected to a cluster. Its methods have Ray's names.

    Args:
        hosts: Number of nodes.
        slow: Share of nodes with a slow network.

    Attributes:
        clock: Clock of the simulation.
        agents: The latest agent of each host.
        calls: Number of calls of agents' methods by host.
        bytes: Size of the arguments of all calls, as pickles.
    """

    def __init__(self, hosts: int, *, slow: float = 0.0):
        self.clock = Clock()
        self.hosts, self._slow_every = hosts, round(1 / slow) if slow else 0
        self.agents: dict[int, SimulatedAgent] = {}
        self.calls: dict[int, int] = {}
        self.bytes = 0
        self.on_call: Callable[[int, str, tuple[Any, ...]], None] = lambda host, method, args: None
        self.exceptions = SimpleNamespace(RayActorError=ActorLostError, GetTimeoutError=TimedOutError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=_Place)
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy: None,
            remove_placement_group=lambda group: None,
            scheduling_strategies=strategies,
        )

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes."""
        return [{"Alive": True, "Resources": {"CPU": 1}}] * self.hosts

    def remote(self, kind: type) -> Any:
        """Return the factory of an actor."""
        return SimpleNamespace(options=lambda scheduling_strategy, **_: _Factory(self, scheduling_strategy.bundle))

    def start_agent(self, host: int) -> "_Actor":
        """Start the agent of a host. A host that was lost needs `REVIVE_SECONDS`."""
        slow = self._slow_every and host % self._slow_every == self._slow_every // 2
        agent = SimulatedAgent(self, host, latency=SLOW if slow else LATENCY)
        if host in self.agents:
            latency, agent.latency = agent.latency, REVIVE_SECONDS
            self.clock.after(REVIVE_SECONDS, lambda: setattr(agent, "latency", latency))
        self.agents[host] = agent
        return _Actor(self, agent)

    def call(self, agent: SimulatedAgent, method: str, args: tuple[Any, ...]) -> Reference:
        """Call a method of an agent."""
        with self.clock.simulating():
            self.calls[agent.number] = self.calls.get(agent.number, 0) + 1
            self.bytes += len(pickle.dumps(args))
            self.on_call(agent.number, method, args)
            return agent.call(method, args)

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        """Return a result, or raise its error."""
        self.wait([reference], num_returns=1, timeout=timeout)
        if not reference.done:
            raise TimedOutError
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(
        self, references: Sequence[Reference], *, num_returns: int, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        """Wait until a number of references are done. Return those that are, and the others."""
        with self.clock.simulating():
            end = self.clock.now() + (1e9 if timeout is None else timeout)
            ready = [reference for reference in references if reference.done]
            for reference in references:
                reference.arrivals = ready
            self.clock.run_due()
            while len(ready) < num_returns and self.clock.now() < end:
                self.clock.skip(end)
                self.clock.run_due()
            for reference in references:
                reference.arrivals = None
            chosen = {id(reference) for reference in ready[:num_returns]}
            return ready[:num_returns], [reference for reference in references if id(reference) not in chosen]

    def kill(self, actor: "_Actor") -> None:
        """End an actor."""
        actor.agent.lose()


@attrs.frozen
class _Place:
    group: Any
    placement_group_bundle_index: int

    @property
    def bundle(self) -> int:
        return self.placement_group_bundle_index


@attrs.frozen
class _Factory:
    cluster: SimulatedRay
    bundle: int

    def remote(self, setup: Any) -> "_Actor":
        return self.cluster.start_agent(self.bundle)


@attrs.frozen
class _Actor:
    cluster: SimulatedRay
    agent: SimulatedAgent

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self.cluster.call(self.agent, method, args))
