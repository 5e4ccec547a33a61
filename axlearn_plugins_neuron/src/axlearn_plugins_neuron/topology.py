"""Stand-in devices for partitioning programs without Trainium hardware."""

import functools
from collections.abc import Sequence
from typing import Any

from axlearn_core.contracts.target import Machine
from axlearn_plugins_neuron.compat import cpu_client


def devices(machine: Machine) -> Sequence[Any]:
    """Return one virtual CPU device per logical core of the machine; see `Target.stand_in`."""
    return _client(machine.devices).devices()


@functools.cache
def _client(count: int) -> Any:
    """Return a CPU client that is separate from JAX's own.

    JAX's own client has enough devices only if no client was created before, and compiles for at most 2,048 devices.
    """
    return cpu_client(count)
