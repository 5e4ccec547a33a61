"""`--on ray`: a supervised run on the machines of a Ray cluster."""

import re
import shlex
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import attrs

from axlearn_core.checkpoint import open_storage
from axlearn_core.compat import assign_environment
from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.launch.exits import DEFAULT_BUDGETS
from axlearn_plugins_runtime.launch.failure_limits import Limits
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.journal import Journal

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # run the agents in this environment instead of a copy made by uv
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Environment variables to set before Ray is imported."""
OLDEST = (2, 55)
"""Oldest supported version of Ray, as in the `ray` extra."""


@attrs.frozen(kw_only=True)
class SupervisorOptions:
    """Options for supervised runs. See `Limits`."""

    budget_infrastructure: int = DEFAULT_BUDGETS["infrastructure"]
    budget_stalled: int = DEFAULT_BUDGETS["stalled"]
    budget_data: int = DEFAULT_BUDGETS["data"]
    budget_user: int = DEFAULT_BUDGETS["user"]
    host_deaths: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    crash_loop: int = attrs.field(default=5, validator=attrs.validators.ge(1))
    freeze_seconds: float = attrs.field(default=5.0, validator=attrs.validators.gt(0))
    hang_seconds: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    save_seconds: float = attrs.field(default=2400.0, validator=attrs.validators.gt(0))
    start_seconds: float = attrs.field(default=3600.0, validator=attrs.validators.gt(0))
    host_seconds: float = attrs.field(default=120.0, validator=attrs.validators.gt(0))
    compile_cache: bool = True

    def limits(self) -> Limits:
        """Return the limits for the supervisor."""
        budgets = {
            "infrastructure": self.budget_infrastructure,
            "stalled": self.budget_stalled,
            "data": self.budget_data,
            "user": self.budget_user,
        }
        return Limits(
            budgets={**DEFAULT_BUDGETS, **budgets},
            host_deaths=self.host_deaths,
            crash_loop=self.crash_loop,
            freeze_seconds=self.freeze_seconds,
            hang_seconds=self.hang_seconds,
            save_seconds=self.save_seconds,
            start_seconds=self.start_seconds,
            host_seconds=self.host_seconds,
        )


@attrs.frozen(kw_only=True)
class RayOptions(SupervisorOptions):
    """Options for `--on ray`.

    Attributes:
        address: Address of the Ray cluster.
        cpus, gpus, tpus: Resources of each agent on its node.
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float | None = None
    tpus: float | None = None


class RayLauncher:
    """Starts an agent on each machine of a Ray cluster, and supervises the trainers."""

    Options: type = RayOptions
    spread = True

    def check(self) -> None:
        """See `Launcher`."""
        if find_spec("ray") is None:
            raise RequestError(
                "--on ray and --on local require Ray, which is not installed\n"
                '    fix: pip install "axlearn-plugins-runtime[ray]"'
            )
        text = version("ray")
        if tuple(int(number) for number in re.findall(r"\d+", text)[:2]) < OLDEST:
            raise RequestError(
                f"--on ray and --on local require Ray {'.'.join(map(str, OLDEST))} or newer\n    got: Ray {text}\n"
                '    fix: pip install --upgrade "axlearn-plugins-runtime[ray]"'
            )

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """See `Launcher`."""
        from axlearn_plugins_runtime.launch.supervised_job import compile_cache, supervise

        if dry_run:
            self._print(job, compile_cache(job))
            return 0
        Journal(open_storage(job.run_dir)).check()
        assign_environment(QUIET)
        import ray

        from axlearn_plugins_runtime.launch.ray_pool import RayPool

        self._connect(ray, job)
        try:
            with RayPool(ray, job, spread=self.spread, resources=self._resources(job)) as pool:
                return supervise(job, pool)
        finally:
            ray.shutdown()

    def _connect(self, ray: Any, job: Job) -> None:
        try:
            ray.init(address=job.options.address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(_connection_failure(job.options.address, str(error))) from error

    def _resources(self, job: Job) -> dict[str, float]:
        """Return the Ray resources of a host: the chips in the options, or else those of the target."""
        options, machine = job.options, job.machine
        amounts: dict[str, float] = {"CPU": options.cpus}
        for name, platform, requested in (("GPU", "gpu", options.gpus), ("TPU", "tpu", options.tpus)):
            chips = machine.chips_per_host if machine and machine.target.platform == platform else 0
            if number := requested if requested is not None else chips:
                amounts[name] = number
        return amounts

    def _print(self, job: Job, cache: str | None) -> None:
        print(
            f"# on each of {job.hosts} hosts ({job.spares} spares), {job.processes_per_host} process(es), under an agent:"
        )
        names = {**job.environment, "JAX_COMPILATION_CACHE_DIR": cache or "", "JAX_NUM_PROCESSES": str(job.processes)}
        for name, value in names.items():
            print(f"export {name}={shlex.quote(value)}")
        print("export JAX_COORDINATOR_ADDRESS=...  # on rank 0's host, a new one for each attempt")
        print("export JAX_PROCESS_ID=...")
        print(shlex.join(("axlearn", *job.train_words())))


def _connection_failure(address: str, text: str) -> str:
    """Return the message for a failed connection. It quotes Ray's first line, or both sets of versions if they differ."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or "ersion mismatch" not in lines[0]:
        reason = lines[0] if lines else "no reason was given"
        fix = "start one (`ray start --head`), set --option address=HOST:PORT, or use --on local"
        return f"cannot connect to the Ray cluster at {address!r}: {reason}\n    fix: {fix}"
    versions = re.findall(r"(?:Ray|Python): ?([\w.+-]+)", text)
    cluster, process = ", ".join(versions[:2]), ", ".join(versions[2:4])
    return (
        f"the Ray cluster at {address!r} has different versions of Ray and Python\n    got: {process or lines[-1]} here\n"
        f"    expected: {cluster or lines[0]}\n    fix: install the cluster's versions here, or start the cluster with these"
    )
