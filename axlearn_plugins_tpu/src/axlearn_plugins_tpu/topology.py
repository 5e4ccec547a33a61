"""Abstract JAX devices that represent TPUs. libtpu can compile for them without a TPU."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_plugins_tpu import compat
from axlearn_plugins_tpu.shapes import SLICES, domain_shape


def topology_name(machine: Machine) -> str:
    """Return libtpu's name for one slice, such as `v5p:8x8x8`. Raise `RequestError` if no slice has that size."""
    return f"{SLICES[machine.target.name].prefix}:{'x'.join(map(str, domain_shape(machine)))}"


def devices(machine: Machine) -> Sequence[Any]:
    """Return the devices of all slices as compilation targets. Programs cannot run on them.

    Raises:
        RequestError: If no slice has that many chips, or if libtpu is not installed.
    """
    name = topology_name(machine)
    if find_spec("libtpu") is None:
        raise RequestError(
            f"cannot compile for {machine.name!r}: libtpu is not installed\n    fix: pip install 'jax[tpu]'"
        )
    compat.describe_host(SLICES[machine.target.name].accelerator)
    compat.allow_compile_only()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if machine.domains > 1:
        options["num_slices"] = machine.domains
    if machine.target.name == "tpu-v4":
        options["chip_config_name"] = "megacore"  # otherwise each core would be a separate device
    if machine.chips_per_host == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
