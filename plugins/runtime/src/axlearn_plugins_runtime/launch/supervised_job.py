"""Set up the agents of a job, and supervise its run."""

import functools
import json
import re
import signal
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint import open_storage
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError
from axlearn_plugins_runtime.launch.agent import Setup
from axlearn_plugins_runtime.launch.check import reduced_words
from axlearn_plugins_runtime.launch.job import CachesCompilation, Job
from axlearn_plugins_runtime.launch.journal import Journal
from axlearn_plugins_runtime.launch.pool import Pool
from axlearn_plugins_runtime.launch.supervisor import Supervisor


def is_uri(run_dir: str) -> bool:
    """Return True if a run directory is a URI and not a local path."""
    return re.match(r"[a-z][a-z0-9+.-]+://", run_dir) is not None


def compile_cache(job: Job) -> str | None:
    """Return the directory of compiled programs, or None if they are not cached.

    Rank 0 writes it and all ranks read it, so all hosts must be able to reach it.
    """
    is_off = isinstance(job.options, CachesCompilation) and not job.options.compile_cache
    if is_off or "JAX_COMPILATION_CACHE_DIR" in job.environment:
        return job.environment.get("JAX_COMPILATION_CACHE_DIR")
    return None if is_uri(job.run_dir) else str(Path(job.run_dir) / "launch" / "compiled")


def make_setup(job: Job) -> Setup:
    """Return the setup for a job's agents."""
    environment = dict(job.environment)
    if cache := compile_cache(job):
        environment = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        } | environment
    return Setup(
        words=job.train_words(),
        document=job.document,
        bases=job.bases,
        environment=environment,
        logs=None if is_uri(job.run_dir) else str(Path(job.run_dir) / "launch" / "logs"),
        processes=job.processes_per_host,
        keep=tuple(job.environment),
    )


def supervise(job: Job, pool: Pool) -> int:
    """Run a job on a pool of hosts until it finishes. SIGTERM and SIGINT save and stop it. See `Supervisor.run`."""
    storage = open_storage(job.run_dir)
    machine = job.machine

    @functools.cache
    def devices() -> int:  # cached, because an attempt with fewer hosts writes a smaller number
        return locked_devices(storage, job.processes)

    supervisor = Supervisor(
        pool,
        hosts=job.hosts,
        limits=job.options.limits(),
        journal=Journal(storage),
        reduce=lambda processes: reduced_words(job.config, job.machine, job.processes, processes, devices()),
        processes_per_host=job.processes_per_host,
        slices=machine.domains if machine is not None and machine.target.platform == "tpu" else 1,
    )

    def stop(number: int, _frame: Any) -> None:
        if supervisor.stop_signal is not None:  # the second signal stops at once
            raise KeyboardInterrupt
        supervisor.stop(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def locked_devices(storage: Storage, processes: int) -> int:
    """Return the number of devices recorded in the run's lock, or one per process if the lock records none."""
    try:
        count = int(str(json.loads(storage.read("run.lock.json"))["devices"]).partition(" x ")[0])
    except (StorageError, ValueError, KeyError):
        return processes
    return processes if count % processes else count
