"""Devices to partition programs over where no Trainium is."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from jaxlib import xla_client

from axlearn_core.contracts.target import Machine


def devices(machine: Machine) -> Sequence[Any]:
    """As many virtual CPU devices as the machine has logical cores: a stand-in, see `Target.stand_in`."""
    return _client(machine.devices).devices()


@functools.cache
def _client(count: int) -> Any:
    """A CPU client of its own, beside the one that JAX has.

    JAX's own has so many devices only if nothing has asked for one before, and compiles for at most 2,048: XLA takes those
    beyond for other processes', and has to be given a way to reach them. Nothing runs here, so it is never used.
    """
    bindings: Any = importlib.import_module("jaxlib._jax")  # has no types
    return xla_client.make_cpu_client(num_devices=count, collectives=bindings.make_mpi_collectives())
