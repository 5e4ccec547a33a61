"""`Target`, a kind of hardware, and `Machine`, a group of its chips. This module does not import JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from axlearn_core.errors import RequestError

MAX_DEVICES = 1 << 20
"""Maximum size of a machine.

Larger sizes are almost certainly typos, and compilers that target hardware from a description fail on them in various ways.
"""


@attrs.frozen(kw_only=True)
class Target:
    """A kind of hardware. A device is a JAX device, and a chip may have several devices.

    Attributes:
        name: Name of the target (`h100`, `tpu-v5p`). A name with a size is a machine (`h100-8x64`).
        size: Format of the size. `devices`: `-N`. `chips` and `cores`: `-N` for one slice, `-NxS` for S slices.
            `hosts`: `-CxH` for C chips on each of H hosts.
        platform: JAX platform (`cpu`, `gpu`, `tpu`, `neuron`), which determines the available kernels.
        device_kinds: Values of `jax.Device.device_kind` for this hardware.
        devices_per_chip: Number of JAX devices per chip.
        cores_per_chip: Number of cores per chip, for sizes in `cores`.
        chips_per_host: Number of chips in a complete host.
        peak_flops: Dense FLOP/s of one device by dtype name (`bfloat16`). Empty if unknown.
        hbm_bytes: Memory of one device that is available to programs, in bytes.
        hbm_bandwidth: Memory bandwidth of one device, in bytes/s.
        host_bytes: Host memory per device, in bytes. None if unknown.
        link_bandwidth: Bytes/s that one device sends within its domain (a TPU slice or an NVLink host) over all links.
        network_bandwidth: Bytes/s that one device sends out of its domain.
        topology: `"module:function"` that returns the described JAX devices of a `Machine`, for compiling without the hardware.
            It raises `RequestError` if the compiler is not installed. None if compiling requires the hardware.
        domain_shape: `"module:function"` that returns the number of chips along each dimension of a domain in a `Machine`. It
            raises `RequestError` if no domain has that size. None if chips are not arranged in a grid.
        lowering: `"module:function"` that returns a context manager for this target. It is active while programs are lowered,
            for settings that JAX's lowering cannot receive in any other way. None if it is not needed.
        skip_assembly: `"module:function"` that returns a context manager for compiling programs that never run, such as those of
            plans. It yields compiler options that save time on machine code, and that change neither buffers nor the schedule.
            None if there are none.
        stand_in: Reason why a program compiled without the hardware differs from the real one. Empty if it does not.
        compiler_options: Options for `Lowered.compile`.
        source: Source of the figures.
        summary: One-line description for listings.
    """

    name: str
    size: Literal["devices", "chips", "cores", "hosts"] = "devices"
    platform: str = "cpu"
    device_kinds: tuple[str, ...] = ()
    devices_per_chip: int = 1
    cores_per_chip: int = 1
    chips_per_host: int = 8
    peak_flops: Mapping[str, float] = {}
    hbm_bytes: float | None = None
    hbm_bandwidth: float | None = None
    host_bytes: float | None = None
    link_bandwidth: float | None = None
    network_bandwidth: float | None = None
    topology: str | None = None
    domain_shape: str | None = None
    lowering: str | None = None
    skip_assembly: str | None = None
    stand_in: str = ""
    compiler_options: Mapping[str, Any] = {}
    examples: tuple[str, ...] = ()
    source: str = ""
    summary: str = ""

    def make_machine(self, devices: int, domains: int = 1) -> Machine | None:
        """Return the machine with `devices` JAX devices in domains of equal size, or None if this target has no such machine."""
        chips, rest = divmod(devices, self.devices_per_chip)
        if rest or not chips or chips % domains:
            return None
        if self.size == "devices":
            return self.machine(self.name if chips == 1 else f"{self.name}-{chips}")
        if self.size == "hosts":
            return self.machine(f"{self.name}-{chips // domains}x{domains}")
        units = chips // domains * (self.cores_per_chip if self.size == "cores" else 1)
        return self.machine(f"{self.name}-{units}" + (f"x{domains}" if domains > 1 else ""))

    @property
    def form(self) -> str:
        """Human-readable format for machine names."""
        unit = {"devices": "DEVICES", "chips": "CHIPS[xSLICES]", "cores": "CORES[xSLICES]", "hosts": "CHIPSxHOSTS"}
        return f"{self.name}-{unit[self.size]}"

    def machine(self, name: str) -> Machine:
        """Parse the name of a machine: the name of this target, optionally followed by a dash and a size.

        Raises:
            RequestError: If the size is invalid.
        """
        form = {"devices": "-(N)", "hosts": "-(N)x(N)"}.get(self.size, "-(N)(?:x(N))?").replace("N", r"[1-9]\d*")
        match = re.fullmatch(rf"{re.escape(self.name)}(?:{form})?", name)
        first, second = (*(int(g or 1) for g in match.groups()), 1)[:2] if match else (0, 0)
        if not match or (self.size == "cores" and first % self.cores_per_chip):
            per = f"; {self.cores_per_chip} cores make a chip" if self.cores_per_chip > 1 else ""
            example = f", such as {self.examples[0]}" if self.examples else ""
            raise RequestError(
                f"{name!r} is not a size of the target {self.name!r}\n    expected: {self.form}{example}{per}"
            )
        if first * second > MAX_DEVICES:
            raise RequestError(f"{name!r} is larger than any machine\n    expected: at most {MAX_DEVICES:,} devices")
        if self.size == "hosts":
            return Machine(name=name, target=self, chips=first * second, domains=second, chips_per_host=first)
        chips = first // self.cores_per_chip if self.size == "cores" else first
        return Machine(
            name=name,
            target=self,
            chips=chips * second,
            domains=second,
            chips_per_host=min(self.chips_per_host, chips),
        )


@attrs.frozen(kw_only=True)
class Machine:
    """A group of chips of the same target, such as a TPU slice or several GPU hosts.

    Attributes:
        chips: Total number of chips.
        domains: Number of chip groups with fast internal links: TPU slices or GPU hosts.
    """

    name: str
    target: Target
    chips: int
    domains: int
    chips_per_host: int

    @property
    def devices(self) -> int:
        """Total number of JAX devices."""
        return self.chips * self.target.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        """Number of JAX devices per host."""
        return self.chips_per_host * self.target.devices_per_chip

    @property
    def devices_per_domain(self) -> int:
        """Number of JAX devices per domain."""
        return self.devices // self.domains


@attrs.frozen(kw_only=True)
class DetectedMachine:
    """The machine of a job, detected from JAX's devices.

    Attributes:
        description: Human-readable description: `8 x NVIDIA H100 80GB HBM3`.
        machine: The machine, or None if no installed plugin recognizes it.
    """

    description: str
    machine: Machine | None
