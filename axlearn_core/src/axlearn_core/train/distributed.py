"""Several processes as one job, through `jax.distributed`."""

import os

import jax

from axlearn_core.config import Node, node
from axlearn_core.errors import Problem

# What the launchers that `jax.distributed` recognises set for more than one process.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")


@node
class Distributed(Node[None]):
    """`auto` joins where a launcher says that there is more than one process; `on` always; `off` never.

    With all of `coordinator_address`, `num_processes` and `process_id` (or `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID` in the environment) nothing has to be detected.
    """

    mode: str = "auto"
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def validate(self):  # an iterable of Problem, as in Node
        """The mode has a name that is known."""
        if self.mode not in ("auto", "on", "off"):
            yield Problem(path="mode", message="unknown mode", got=self.mode, expected="auto, on or off")

    def initialize(self) -> None:
        """Joins the job, once."""
        env = os.environ
        many = any(env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1 for name in _COUNTS)
        given = self.coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
        if self.mode == "off" or (self.mode == "auto" and not (many or given)) or jax.distributed.is_initialized():
            return

        def number(own: int | None, name: str) -> int | None:
            return own if own is not None else int(env[name]) if name in env else None

        jax.distributed.initialize(
            coordinator_address=given,
            num_processes=number(self.num_processes, "JAX_NUM_PROCESSES"),
            process_id=number(self.process_id, "JAX_PROCESS_ID"),
        )
