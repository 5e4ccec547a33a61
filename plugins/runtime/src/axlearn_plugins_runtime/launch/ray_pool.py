"""The hosts of a job as Ray actors: a placement group with one bundle per host and one agent per bundle."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.agent import Agent
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.pool import HostLostError
from axlearn_plugins_runtime.launch.supervised_job import make_setup

POLL_SECONDS = 5.0
CHECK_SECONDS = 1.0
"""Seconds between checks for agents that do not respond."""
JOIN_SECONDS = 2e-5
"""Seconds for each host to wait for more events after the first one, because each call looks at the references of all hosts."""
ANSWER_SECONDS = 15.0
"""Seconds without a response, beyond the requested wait, after which an agent counts as lost."""


class RayAgent(Agent):
    """An agent that knows the address of its node."""

    def describe(self) -> dict[str, Any]:
        """Return the host's name, the address at which other nodes reach it, and the agent's process id."""
        import ray

        return {**super().describe(), "address": ray.util.get_node_ip_address()}


class RayPool:
    """A pool of Ray actors. See `pool.Pool`.

    Args:
        ray: The `ray` module, connected to a cluster.
        job: The job to train.
        spread: Place each host on a separate node.
        resources: Ray resources of a bundle.
        now: Returns the current time in seconds, for simulations.

    Raises:
        RequestError: The cluster has too few nodes.
    """

    def __init__(
        self,
        ray: Any,
        job: Job,
        *,
        spread: bool,
        resources: Mapping[str, float],
        now: Callable[[], float] = time.monotonic,
    ):
        self.now, self._checked = now, now()
        self.ray, self.job, self.resources, self.spread = ray, job, dict(resources), spread
        self.count = job.hosts + job.spares
        if spread:
            self._check_nodes()
        strategy = "STRICT_SPREAD" if spread else "PACK"
        self.group = ray.util.placement_group([dict(resources)] * self.count, strategy=strategy)
        self.actors: dict[int, Any] = {}
        self._polls: dict[Any, tuple[int, float]] = {}
        self._hosts: dict[Any, int] = {}
        self._lost: list[tuple[int, dict[str, Any]]] = []
        self.setup = make_setup(job)
        for number in range(self.count):
            self.revive(number)

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, host: int, method: str, *args: Any) -> None:
        """See `Pool`."""
        if (actor := self.actors.get(host)) is not None:
            _start(actor, method, args)

    def ask(self, host: int, method: str, *args: Any) -> Any:
        """See `Pool`."""
        answers = self.ask_all([host], method, *args)
        if host not in answers:
            raise HostLostError(f"host {host} is lost")
        return answers[host]

    def ask_all(self, hosts: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        """See `Pool`."""
        references = {host: _start(self.actors[host], method, args) for host in hosts if host in self.actors}
        answers: dict[int, Any] = {}
        end = self.now() + 2 * ANSWER_SECONDS
        for host, reference in references.items():
            try:
                answers[host] = self.ray.get(reference, timeout=max(0.0, end - self.now()))
            except self.ray.exceptions.RayActorError as error:
                self._lose(host, _reason(error))
            except self.ray.exceptions.GetTimeoutError:
                self._lose(host, f"its agent did not respond for {2 * ANSWER_SECONDS:.0f} s")
        return answers

    def wait(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """See `Pool`."""
        references = [*self._polls, *self._hosts]
        events, self._lost = self._lost, []
        if not references or events:
            if not events:
                time.sleep(timeout)
            return events
        ready, _ = self.ray.wait(references, num_returns=1, timeout=timeout)
        if ready:  # collect all other ready references
            pause = JOIN_SECONDS * len(references)
            ready, _ = self.ray.wait(references, num_returns=len(references), timeout=pause)
        for reference in ready:
            events += self._arrival_events(reference)
        self._lose_silent_agents()
        events, self._lost = events + self._lost, []
        return events

    def revive(self, host: int) -> None:
        """See `Pool`."""
        strategies = self.ray.util.scheduling_strategies
        place = strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=host)
        actor = (
            self.ray.remote(RayAgent)
            .options(
                num_cpus=self.resources.get("CPU", 0),
                num_gpus=self.resources.get("GPU", 0),
                resources={"TPU": self.resources["TPU"]} if "TPU" in self.resources else None,
                max_concurrency=8,
                max_restarts=0,
                scheduling_strategy=place,
            )
            .remote(self.setup)
        )
        self.actors[host] = actor
        self._hosts[actor.describe.remote()] = host

    def close(self) -> None:
        """See `Pool`."""
        pending = [actor.close.remote() for actor in self.actors.values()]
        self.ray.wait(pending, num_returns=len(pending), timeout=10)
        for actor in self.actors.values():
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self.group)

    def _arrival_events(self, reference: Any) -> list[tuple[int, dict[str, Any]]]:
        described = reference in self._hosts
        number = self._hosts.pop(reference) if described else self._polls.pop(reference)[0]
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            self._lose(number, _reason(error))
            return []
        self._poll(number)
        if not described:
            return [(number, event) for event in result]
        name = result["host"] if self.spread else f"{result['host']}/{number}"
        return [(number, {"event": "host", "name": name, "address": result["address"]})]

    def _poll(self, number: int) -> None:
        self._polls[self.actors[number].events.remote(POLL_SECONDS)] = (number, self.now())

    def _lose_silent_agents(self) -> None:
        now = self.now()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        for reference, (number, since) in list(self._polls.items()):
            if now - since > POLL_SECONDS + ANSWER_SECONDS and reference in self._polls:
                self._lose(number, f"its agent did not respond for {now - since:.0f} s")

    def _lose(self, number: int, reason: str) -> None:
        actor = self.actors.pop(number, None)
        if actor is None:
            return
        for pending in (self._polls, self._hosts):
            for reference in [r for r, n in pending.items() if (n[0] if isinstance(n, tuple) else n) == number]:
                del pending[reference]
        self.ray.kill(actor)
        self._lost.append((number, {"event": "lost", "reason": reason}))

    def _check_nodes(self) -> None:
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        fits = [n for n in nodes if all(n["Resources"].get(k, 0) >= v for k, v in self.resources.items())]
        if len(fits) < self.count:
            amounts = ", ".join(f"{value:g} {name}" for name, value in self.resources.items())
            raise RequestError(
                f"the Ray cluster has {len(fits)} nodes with {amounts}, of {len(nodes)} in total\n"
                f"    expected: {self.count} ({self.job.hosts} hosts and {self.job.spares} spares, each on a separate node)\n"
                "    fix: use fewer --hosts or --spares, add nodes, or use --on local to run all hosts on this machine"
            )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "node" in line.lower() or "exit" in line.lower() or "died" in line.lower()]
    return (reasons or lines or ["the actor died"])[0][:300]


def _start(actor: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Call an actor's method without waiting for it. Return Ray's reference to the result."""
    return getattr(actor, method).remote(*args)
