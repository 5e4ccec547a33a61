"""Private names of jaxlib that this plugin uses.

`jaxlib._jax.make_mpi_collectives`: a CPU client with more than 2,048 devices needs a cross-process collectives
implementation, because XLA assumes that the devices beyond that number belong to other processes. Nothing runs on the
client, so the implementation is never called. Needed for jaxlib 0.10 to 0.12. Remove once clients for
abstract devices no longer need it, or once Neuron's compiler describes its topologies to JAX.
"""

import importlib
from typing import Any

from jaxlib import xla_client


def cpu_client(count: int) -> Any:
    """Return a new CPU client with `count` devices, separate from JAX's own."""
    bindings: Any = importlib.import_module("jaxlib._jax")  # untyped
    return xla_client.make_cpu_client(num_devices=count, collectives=bindings.make_mpi_collectives())
