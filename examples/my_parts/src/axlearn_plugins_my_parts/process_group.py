"""The component `rank-from-environment`."""

import os

import jax

from axlearn_core.extend import Configurable, RequestError, node


class RankFromEnvironment(Configurable):
    """Joins the processes that a launcher such as `torchrun` started, by the variables that it sets."""

    @node
    class Config(Configurable.Config["RankFromEnvironment"]):
        """The names of the variables. Without all of them the process stays alone."""

        rank: str = "RANK"
        count: str = "WORLD_SIZE"
        address: str = "MASTER_ADDR"
        port: str = "MASTER_PORT"

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def initialize(self) -> None:
        """Joins, once. Raises `RequestError` where only some of the variables are set, or one is not a number."""
        names = (self.cfg.rank, self.cfg.count, self.cfg.address, self.cfg.port)
        values = {name: os.environ[name] for name in names if name in os.environ}
        if not values or jax.distributed.is_initialized():
            return
        numbers = (values.get(self.cfg.rank, ""), values.get(self.cfg.count, ""))
        if len(values) < len(names) or not all(number.isdigit() for number in numbers):
            raise RequestError(
                f"the launcher's variables do not say which process this is\n    got: {values}\n"
                f"    expected: {', '.join(names)}, the first two of them numbers\n"
                "    fix: set all of them, or none for a single process"
            )
        rank, count = map(int, numbers)
        jax.distributed.initialize(f"{values[self.cfg.address]}:{values[self.cfg.port]}", count, rank)
