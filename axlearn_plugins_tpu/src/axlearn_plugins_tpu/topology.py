"""JAX devices of TPUs that are not here, to compile for: libtpu is a compiler too, and needs no TPU for that."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_plugins_tpu import compat
from axlearn_plugins_tpu.shapes import SLICES, domain_shape


def topology_name(machine: Machine) -> str:
    """What libtpu calls one slice of the machine: `v5p:8x8x8`; raises `RequestError` where no slice has that size."""
    return f"{SLICES[machine.target.name].prefix}:{'x'.join(map(str, domain_shape(machine)))}"


def devices(machine: Machine) -> Sequence[Any]:
    """The devices of all slices, to compile for; programs cannot run on them.

    Raises:
        RequestError: no slice has that many chips, or libtpu is not installed.
    """
    name = topology_name(machine)
    if find_spec("libtpu") is None:
        raise RequestError(
            f"compiling for {machine.name!r} needs libtpu, which is not installed\n    fix: pip install 'jax[tpu]'"
        )
    compat.describe_host(SLICES[machine.target.name].accelerator)
    compat.only_compile()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if machine.domains > 1:
        options["num_slices"] = machine.domains
    if machine.target.name == "tpu-v4":
        options["chip_config_name"] = "megacore"  # otherwise each core is a device of its own
    if machine.chips_per_host == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
