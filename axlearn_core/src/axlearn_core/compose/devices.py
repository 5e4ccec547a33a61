"""Local devices to run on, and described devices to compile for."""

import collections
import contextlib
import socket
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from axlearn_core import compat
from axlearn_core.contracts.capabilities import HasProcessGroup
from axlearn_core.contracts.target import Detected, Machine, Target
from axlearn_core.errors import RequestError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_core.plugins.targets import load


def configure_devices(machine: Machine | None) -> None:
    """Sets up virtual CPU devices for a CPU machine. Call before JAX starts; None uses the devices that JAX finds."""
    host().hook.axlearn_before_devices()
    if machine is not None and machine.target.platform == "cpu":
        if machine.devices > 1:
            compat.threads_for(machine.devices)
        virtual(machine.devices)  # `local_devices` counts them, once all processes have joined


def cpu(machine: Machine) -> Sequence[Any]:
    """As many virtual devices as the machine has.

    Raises:
        RequestError: JAX has started with fewer.
    """
    virtual(machine.devices)
    return _check_count(machine, jax.devices("cpu"))


def virtual(count: int) -> None:
    """Gives this process `count` virtual CPU devices and no others, where JAX has not started yet."""
    compat.forget_device_count()
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")


def local_devices(machine: Machine | None) -> Sequence[Any]:
    """All devices that JAX sees. Where a machine is named, they have to be its devices.

    Raises:
        RequestError: there are others, or another number of them.
    """
    devices = jax.devices()
    if machine is None:
        return devices
    kinds = machine.target.device_kinds
    if kinds and devices[0].device_kind not in kinds:
        raise RequestError(
            f"the target {machine.name!r} is not this machine\n"
            f"    got: {len(devices)} x {devices[0].device_kind}\n    expected: {machine.devices} x {' or '.join(kinds)}\n"
            "    fix: leave --target out to run on this machine, or compile for the target: `axlearn plan`"
        )
    return _check_count(machine, devices)


def detect() -> Detected:
    """What this job runs on. In a job of several processes all of them have to call it, once they have joined."""
    devices = jax.devices()
    counts = collections.Counter(d.device_kind for d in devices)
    target = host().target(devices[0].device_kind) if len(counts) == 1 else None
    return Detected(
        description=", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())),
        machine=target and target.machine_of(len(devices), _count_domains(target, devices)),
    )


def detect_for(config: object) -> Detected:
    """What the job of a config runs on, once its processes have joined."""
    configure_devices(None)
    if isinstance(config, HasProcessGroup):
        config.distributed.build().initialize()
    return detect()


def resolve_for_devices(request: Request) -> Resolved:
    """The complete config of a request for the machine that it names, or for this one if it names none.

    JAX's devices are set up for it.

    Raises:
        RequestError: the request is wrong; then JAX has not started.
    """
    resolved = resolve(request, detect=detect_for).checked()
    if not resolved.detected:
        configure_devices(resolved.machine)
    return resolved


def slice_of(device: Any) -> int | None:
    """The slice of a TPU that a device is in; None for other devices, and for one whose slice nobody says."""
    return getattr(device, "slice_index", None)


def coordinates_of(device: Any) -> list[int]:
    """The place of a TPU chip among its neighbours; empty for other devices."""
    return list(getattr(device, "coords", ())) if device.platform == "tpu" else []


def client_of(device: Any) -> Any:
    """What compiles for a device; None if the device is only described and its library does not say."""
    return getattr(device, "client", None)


def _count_domains(target: Target, devices: Sequence[Any]) -> int:
    """Groups of devices with fast links among themselves: the slices of a TPU, the hosts of GPUs."""
    if target.size in ("chips", "cores"):
        return len({slice_of(d) for d in devices})
    if target.size != "hosts" or jax.process_count() == 1:
        return 1
    name = zlib.crc32(socket.gethostname().encode())  # a host may have a process for each of its devices
    return len(set(multihost_utils.process_allgather(np.asarray([name], np.uint32)).reshape(-1).tolist()))


def _check_count(machine: Machine, devices: Sequence[Any]) -> Sequence[Any]:
    if len(devices) != machine.devices:
        raise RequestError(
            f"the target {machine.name!r} has {machine.devices} devices, and JAX sees {len(devices)}\n"
            "    fix: name the target of these devices, or start a process on every host"
        )
    return devices


def topology_devices(machine: Machine) -> Sequence[Any]:
    """Devices that can be compiled for, and need not be here.

    Raises:
        RequestError: nothing can compile for this target without it, or its compiler is not installed.
    """
    if machine.target.topology is None:
        raise RequestError(f"nothing that is installed can compile for {machine.name!r} without that hardware")
    make: Any = load(machine.target.topology)
    return make(machine)
