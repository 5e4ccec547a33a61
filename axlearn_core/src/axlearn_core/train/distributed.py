"""Several processes as one job, through `jax.distributed`."""

import functools
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

# What the launchers that `jax.distributed` recognises set for more than one process.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")


class Distributed(Configurable):
    """The processes of a job, joined by `jax.distributed`."""

    @node
    class Config(Configurable.Config["Distributed"]):
        """`auto` joins where a launcher says that there is more than one process; `on` always; `off` never.

        With all of `coordinator_address`, `num_processes` and `process_id` (or `JAX_COORDINATOR_ADDRESS`,
        `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` in the environment) nothing has to be detected.
        """

        mode: Literal["auto", "on", "off"] = "auto"
        coordinator_address: str | None = None
        num_processes: int | None = None
        process_id: int | None = None
        # Without a word from a process for so long, the others end. A supervisor (`axlearn launch`) sees it at once.
        heartbeat_seconds: int = setting(default=100, hide_default=True, ge=1)
        # At the start, processes wait so long for each other.
        join_seconds: int = setting(default=300, hide_default=True, ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def initialize(self) -> None:
        """Joins the job, once."""
        cfg, env = self.cfg, os.environ
        many = any(env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1 for name in _COUNTS)
        coordinator = cfg.coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
        if cfg.mode == "off" or (cfg.mode == "auto" and not (many or coordinator)) or jax.distributed.is_initialized():
            return

        def number(own: int | None, name: str) -> int | None:
            return own if own is not None else int(env[name]) if name in env else None

        timer = threading.Timer(cfg.join_seconds, _give_up, (coordinator or "the coordinator", cfg.join_seconds))
        timer.daemon = True
        timer.start()
        try:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=number(cfg.num_processes, "JAX_NUM_PROCESSES"),
                process_id=number(cfg.process_id, "JAX_PROCESS_ID"),
                heartbeat_timeout_seconds=cfg.heartbeat_seconds,
                initialization_timeout=cfg.join_seconds + 60,  # then XLA aborts, with the stack of its own code
            )
        finally:
            timer.cancel()


def _give_up(coordinator: str, seconds: int) -> None:
    """Ends this process, which waits in XLA and cannot be interrupted."""
    text = (
        f"error: not all processes of this job came to {coordinator} within {seconds} s (distributed.join_seconds)\n"
        "    fix: see why one of them ended or did not begin, and start all of them again"
    )
    print(escape_controls(text), file=sys.stderr, flush=True)
    os._exit(os.EX_IOERR)


def allgather_data_state(state: object) -> Any:
    """The states of all processes as one: mappings are united key by key, other values are the first process's."""
    if jax.process_count() == 1:
        return state
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray([text.size])).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return functools.reduce(_union, [json.loads(bytes(r[:n])) for r, n in zip(rows, sizes, strict=True)])


def _union(a: object, b: object) -> Any:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a
    return {k: _union(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in a | b}
