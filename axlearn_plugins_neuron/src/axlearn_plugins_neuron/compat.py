"""Private names of jaxlib that this plugin uses.

`jaxlib._jax.make_mpi_collectives`: a CPU client of more than 2,048 devices has to be given a way to reach other processes,
because XLA takes those beyond for theirs. Nothing runs there, so it is never used. jaxlib 0.10 to 0.12; not needed once a client
for absent devices can be made without one, or Neuron's compiler describes its topologies to JAX.
"""

import importlib
from typing import Any

from jaxlib import xla_client


def cpu_client(count: int) -> Any:
    """A CPU client with `count` devices of its own, beside the one that JAX has."""
    bindings: Any = importlib.import_module("jaxlib._jax")  # has no types
    return xla_client.make_cpu_client(num_devices=count, collectives=bindings.make_mpi_collectives())
