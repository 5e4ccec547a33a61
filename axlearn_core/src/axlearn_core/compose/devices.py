"""Local devices for running programs, and described devices for compiling them."""

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
from axlearn_core.contracts.target import DetectedMachine, Machine, Target
from axlearn_core.errors import RequestError, counted
from axlearn_core.plugins.backends import prepare_backends
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_core.plugins.targets import load


def configure_devices(machine: Machine | None) -> None:
    """Set up virtual CPU devices for a CPU machine. Call this before JAX starts. None uses JAX's default devices."""
    prepare_backends()
    if machine is not None and machine.target.platform == "cpu":
        if machine.devices > 1:
            compat.set_thread_count(machine.devices)
        virtual(machine.devices)  # `local_devices` counts them after all processes have joined


def cpu(machine: Machine) -> Sequence[Any]:
    """Return the virtual CPU devices of a machine.

    Raises:
        RequestError: If JAX has already started with a different number of devices.
    """
    virtual(machine.devices)
    return _check_count(machine, jax.devices("cpu"))


def virtual(count: int) -> None:
    """Give this process `count` virtual CPU devices and no other devices. No-op if JAX has already started."""
    compat.forget_device_count()
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")


def local_devices(machine: Machine | None) -> Sequence[Any]:
    """Return all JAX devices. If a machine is given, check that they match it.

    Raises:
        RequestError: If the kind or the number of devices differs.
    """
    prepare_backends()
    devices = jax.devices()
    if machine is None:
        return devices
    kinds = machine.target.device_kinds
    if kinds and devices[0].device_kind not in kinds:
        raise RequestError(
            f"the target {machine.name!r} is not this machine\n"
            f"    got: {len(devices)} x {devices[0].device_kind}\n    expected: {machine.devices} x {' or '.join(kinds)}\n"
            "    fix: omit --target to run on this machine, or use `axlearn plan` to compile for the target"
        )
    return _check_count(machine, devices)


def detect() -> DetectedMachine:
    """Detect the machine of this job. In a job with several processes, all of them must call this after joining the job."""
    devices = jax.devices()
    counts = collections.Counter(d.device_kind for d in devices)
    target = host().target(devices[0].device_kind) if len(counts) == 1 else None
    return DetectedMachine(
        description=", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())),
        machine=target and target.make_machine(len(devices), _count_domains(target, devices)),
    )


def detect_for(config: object) -> DetectedMachine:
    """Join the job that a config describes, and detect the job's machine."""
    configure_devices(None)
    if isinstance(config, HasProcessGroup):
        config.distributed.build().initialize()
    return detect()


def resolve_for_devices(request: Request) -> Resolved:
    """Resolve a request for the machine that it names (default: this machine), and set up JAX's devices.

    Raises:
        RequestError: If the request is invalid. In that case JAX has not started.
    """
    resolved = resolve(request, detect=detect_for).check()
    if not resolved.detected:
        configure_devices(resolved.machine)
    return resolved


def get_slice_index(device: Any) -> int | None:
    """Return the slice index of a TPU, or None for other devices or if it is unknown."""
    return getattr(device, "slice_index", None)


def get_coordinates(device: Any) -> list[int]:
    """Return the coordinates of a TPU chip, or an empty list for other devices."""
    return list(getattr(device, "coords", ())) if device.platform == "tpu" else []


def get_compiler_client(device: Any) -> Any:
    """Return the compiler client of a device, or None for a described device without one."""
    return getattr(device, "client", None)


def _count_domains(target: Target, devices: Sequence[Any]) -> int:
    """Return the number of device groups with fast internal links: TPU slices or GPU hosts."""
    if target.size in ("chips", "cores"):
        return len({get_slice_index(d) for d in devices})
    if target.size != "hosts" or jax.process_count() == 1:
        return 1
    name = zlib.crc32(socket.gethostname().encode())  # a host may have one process per device
    return len(set(multihost_utils.process_allgather(np.asarray([name], np.uint32)).reshape(-1).tolist()))


def _check_count(machine: Machine, devices: Sequence[Any]) -> Sequence[Any]:
    if len(devices) != machine.devices:
        raise RequestError(
            f"the target {machine.name!r} has {counted(machine.devices, 'device')}, but JAX sees {len(devices)}\n"
            "    fix: use the target of these devices, or start a process on every host"
        )
    return devices


def topology_devices(machine: Machine) -> Sequence[Any]:
    """Return the described devices of a machine, for compiling without the hardware.

    Raises:
        RequestError: If the target cannot be compiled without its hardware, or if its compiler is not installed.
    """
    if machine.target.topology is None:
        raise RequestError(f"no installed plugin can compile for {machine.name!r} without the hardware")
    make: Any = load(machine.target.topology)
    return make(machine)
