"""The `rank-from-environment` component."""

import os

import jax

from axlearn_core.extend import Configurable, RequestError, node


class RankFromEnvironment(Configurable):
    """Joins the processes that a launcher such as `torchrun` started."""

    @node
    class Config(Configurable.Config["RankFromEnvironment"]):
        """Names of the environment variables that the launcher sets.

        If none of them is set, the process runs alone.

        Attributes:
            rank: Index of this process.
            count: Number of processes.
            address: Address of process 0.
            port: Port of process 0.
        """

        rank: str = "RANK"
        count: str = "WORLD_SIZE"
        address: str = "MASTER_ADDR"
        port: str = "MASTER_PORT"

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def initialize(self) -> None:
        """Join the other processes, unless JAX is already initialized.

        Raises:
            RequestError: If only some of the variables are set, or one is not a number.
        """
        names = (self.cfg.rank, self.cfg.count, self.cfg.address, self.cfg.port)
        values = {name: os.environ[name] for name in names if name in os.environ}
        if not values or jax.distributed.is_initialized():
            return
        numbers = (values.get(self.cfg.rank, ""), values.get(self.cfg.count, ""))
        if len(values) < len(names) or not all(number.isdigit() for number in numbers):
            raise RequestError(
                f"the launcher's variables are incomplete or invalid\n    got: {values}\n"
                f"    expected: {', '.join(names)}; the first two must be numbers\n"
                "    fix: set all of them, or none for a single process"
            )
        rank, count = map(int, numbers)
        jax.distributed.initialize(f"{values[self.cfg.address]}:{values[self.cfg.port]}", count, rank)
