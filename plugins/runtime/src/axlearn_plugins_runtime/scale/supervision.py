"""Simulate the launcher of a job: its start, the death of a process, and lost hosts."""

import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.errors import WorkError
from axlearn_plugins_runtime.launch.failure_limits import Limits
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.journal import Journal
from axlearn_plugins_runtime.launch.ray_pool import RayPool
from axlearn_plugins_runtime.launch.supervisor import Supervisor
from axlearn_plugins_runtime.scale.simulated_ray import SimulatedAgent, SimulatedRay

START = "start"
"""Name of the first decision. It includes the start of the processes."""
RACK = 64
"""Number of hosts that are lost together."""
SLOW_SHARE = 0.01
"""Share of the hosts with a slow network."""
PEER_SECONDS = 1.0
"""Seconds in which the other processes notice that one has ended (assumed)."""


@attrs.frozen
class Supervision:
    """The decisions of a job's launcher, and their costs.

    Attributes:
        decisions: Event -> seconds until all processes of the next attempt have been told to start.
        calls: Largest number of messages to one host.
        job_calls: Number of messages to all hosts.
        job_bytes: Size of their arguments.
        cpu_seconds: Measured seconds of the launcher's own code.
        memory: Peak of the memory in bytes, if it was measured, with that of the simulated hosts.
    """

    decisions: Mapping[str, float]
    calls: int
    job_calls: int
    job_bytes: int
    cpu_seconds: float
    memory: int


class Scenario:
    """Lets a number of things go wrong, one after the other, each in an attempt of its own.

    Args:
        ray: The simulated cluster.
        hosts: Number of hosts that train.
    """

    def __init__(self, ray: SimulatedRay, hosts: int):
        self.ray, self.hosts = ray, hosts
        self.decisions: dict[str, float] = {}
        self._starts = 0
        self._cause, self._since = START, ray.clock.now()
        self._faults: list[tuple[str, Callable[[], None]]] = [
            ("death of a process", self._kill_one),
            ("lost host", lambda: self._lose(1)),
            (f"{min(RACK, hosts)} lost hosts", lambda: self._lose(min(RACK, hosts))),
            ("end", self._finish),
        ]
        ray.on_call = self._note

    def _note(self, host: int, method: str, args: tuple[Any, ...]) -> None:
        if method != "start":
            return
        self._starts += 1
        if self._starts == self.hosts:
            self._starts = 0
            self.decisions[self._cause] = self.ray.clock.now() - self._since
            self.ray.clock.after(20.0, self._begin_fault)

    def _begin_fault(self) -> None:
        self._cause, fault = self._faults.pop(0)
        self._since = self.ray.clock.now()
        fault()

    def _training(self) -> list[SimulatedAgent]:
        return [agent for agent in self.ray.agents.values() if agent.alive and agent.running[1]]

    def _kill_one(self) -> None:
        agents = self._training()
        middle = len(agents) // 2
        agents[middle].exit_ranks("infrastructure", "killed by SIGKILL")
        self._notice(agents[:middle] + agents[middle + 1 :])

    def _lose(self, count: int) -> None:
        agents = self._training()
        first = min(len(agents) // 3, len(agents) - count)
        for agent in agents[first : first + count]:
            agent.lose()
        self._notice(agents[:first] + agents[first + count :])

    def _notice(self, agents: list[SimulatedAgent]) -> None:
        """Let the other processes end, because they cannot reach the one that is gone."""
        for index, agent in enumerate(agents):
            seconds = PEER_SECONDS * (index + 1) / len(agents)
            attempt = agent.running[0]
            self.ray.clock.after(seconds, lambda agent=agent, attempt=attempt: _end_peer(agent, attempt))

    def _finish(self) -> None:
        for agent in self._training():
            agent.exit_ranks("finished", "finished")


def _end_peer(agent: SimulatedAgent, attempt: int) -> None:
    if agent.alive and agent.running[0] == attempt:
        agent.exit_ranks("peer", "gloo: connection closed")


def supervise_simulated(hosts: int, *, memory: bool = False) -> Supervision:
    """Run the launcher on simulated hosts through a start, a death, a lost host, a lost rack, and the end.

    Args:
        hosts: Number of hosts that train. There are as many spares as a rack has hosts, and two more.
        memory: Whether to measure the memory, which makes the seconds longer.

    Raises:
        WorkError: The job did not finish.
    """
    spares = RACK + 2
    ray = SimulatedRay(hosts + spares, slow=SLOW_SHARE)
    job = Job(name="simulated", experiment="quickstart", run_dir="/simulated", hosts=hosts, spares=spares)
    if memory:
        tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            begun = ray.clock.now()
            scenario = Scenario(ray, hosts)
            pool = RayPool(ray, job, spread=True, resources={"CPU": 1}, now=ray.clock.now)
            supervisor = Supervisor(
                pool, hosts=hosts, limits=Limits(), journal=Journal(LocalStorage(folder)), now=ray.clock.now,
                notify=lambda text: None,
            )  # fmt: skip
            code = supervisor.run()
            pool.close()
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
    finally:
        if memory:
            tracemalloc.stop()
    if code or "end" in scenario.decisions:
        raise WorkError(f"the simulated job ended with code {code}")
    seconds, calls = ray.clock.now() - begun - ray.clock.skipped, max(ray.calls.values())
    return Supervision(scenario.decisions, calls, sum(ray.calls.values()), ray.bytes, seconds, peak)
