"""Devices to partition programs over where no Trainium is."""

import functools
from collections.abc import Sequence
from typing import Any

from axlearn_core.contracts.target import Machine
from axlearn_plugins_neuron.compat import cpu_client


def devices(machine: Machine) -> Sequence[Any]:
    """As many virtual CPU devices as the machine has logical cores: a stand-in, see `Target.stand_in`."""
    return _client(machine.devices).devices()


@functools.cache
def _client(count: int) -> Any:
    """A CPU client of its own, beside the one that JAX has.

    JAX's own has so many devices only if nothing has asked for one before, and compiles for at most 2,048.
    """
    return cpu_client(count)
