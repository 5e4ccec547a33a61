"""Find the plan target of the local device."""

from typing import Any

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.targets import find_machine


def machine_of(device: Any) -> Machine:
    """Return a machine with one device of this kind.

    Raises:
        RequestError: If no plugin knows the device.
    """
    if device.platform == "cpu":
        return find_machine("cpu")
    target = host().target(device.device_kind)
    if target is None:
        raise RequestError(
            f"no installed plugin knows the device {device.device_kind!r}\n"
            "    fix: install axlearn-plugins-gpu or axlearn-plugins-tpu, or add the kind to its targets"
        )
    return find_machine(f"{target.name}-1x1" if target.size == "hosts" else f"{target.name}-{_smallest(target)}")


def _smallest(target: Any) -> int:
    return target.cores_per_chip if target.size == "cores" else 1
