"""Process groups for multi-process jobs, based on `jax.distributed`."""

import json
import os
import sys
import threading
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import escape_controls

# Environment variables that launchers set to the number of processes.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")


class Distributed(Configurable):
    """The process group of a job, initialized by `jax.distributed`."""

    @node
    class Config(Configurable.Config["Distributed"]):
        """Settings for joining the job.

        If `coordinator_address`, `num_processes` and `process_id` (or the environment variables
        `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`) are all set, JAX does not detect the cluster.

        Attributes:
            mode: `auto` joins if a launcher started more than one process, `on` always joins, and `off` never joins.
            heartbeat_seconds: Seconds without a heartbeat after which JAX ends the job. If a process exits, `axlearn launch`
                notices it immediately.
            join_seconds: Seconds to wait for all processes to join.
        """

        mode: Literal["auto", "on", "off"] = "auto"
        coordinator_address: str | None = None
        num_processes: int | None = None
        process_id: int | None = None
        heartbeat_seconds: int = setting(default=100, hide_default=True, ge=1)
        join_seconds: int = setting(default=300, hide_default=True, ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def initialize(self) -> None:
        """Join the job. Do nothing if this process has already joined."""
        cfg, env = self.cfg, os.environ
        many = any(env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1 for name in _COUNTS)
        coordinator = cfg.coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
        if cfg.mode == "off" or (cfg.mode == "auto" and not (many or coordinator)) or jax.distributed.is_initialized():
            return

        def number(setting: int | None, name: str) -> int | None:
            return setting if setting is not None else int(env[name]) if name in env else None

        timer = threading.Timer(cfg.join_seconds, _give_up, (coordinator or "the coordinator", cfg.join_seconds))
        timer.daemon = True
        timer.start()
        try:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=number(cfg.num_processes, "JAX_NUM_PROCESSES"),
                process_id=number(cfg.process_id, "JAX_PROCESS_ID"),
                heartbeat_timeout_seconds=cfg.heartbeat_seconds,
                initialization_timeout=cfg.join_seconds + 60,  # longer, because XLA aborts at its timeout
            )
        finally:
            timer.cancel()


def _give_up(coordinator: str, seconds: int) -> None:
    """End this process, which is blocked in XLA and cannot be interrupted."""
    text = (
        f"error: not all processes of this job joined {coordinator} within {seconds} s (distributed.join_seconds)\n"
        "    fix: find out why a process ended or did not start, and start all of them again"
    )
    print(escape_controls(text), file=sys.stderr, flush=True)
    os._exit(os.EX_IOERR)


def allgather_data_state(state: object) -> Any:
    """Merge the states of all processes. Mappings are merged by key; other values come from process 0."""
    if jax.process_count() == 1:
        return state
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray([text.size])).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return _merge([json.loads(bytes(r[:n])) for r, n in zip(rows, sizes, strict=True)])


def _merge(values: list[Any]) -> Any:
    """Merge mappings by key, or return the first value. The time is linear in the size of the values."""
    if not all(isinstance(value, dict) for value in values):
        return values[0]
    entries: dict[str, list[Any]] = {}
    for value in values:
        for key, entry in value.items():
            entries.setdefault(key, []).append(entry)
    return {key: _merge(same) for key, same in entries.items()}
