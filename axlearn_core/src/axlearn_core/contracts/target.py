"""What is known of hardware, and a number of it under one name. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from axlearn_core.errors import RequestError

MAX_DEVICES = 1 << 20
"""A size beyond it is a slip of the pen; compilers for hardware that is not here fail on it in their own ways."""


@attrs.frozen(kw_only=True)
class Target:
    """A kind of hardware, as far as a plugin knows it. A device is what JAX calls one; a chip may have several.

    Attributes:
        name: what users call it (`h100`, `tpu-v5p`); with a size behind it, it names a machine (`h100-8x64`).
        size: how that size is written. `devices`: `-N`. `chips` and `cores`: `-N` in one slice, `-NxS` in S slices.
            `hosts`: `-CxH`, C chips on each of H hosts.
        platform: the JAX platform (`cpu`, `gpu`, `tpu`, `neuron`), by which kernels are chosen.
        device_kinds: the values of `jax.Device.device_kind` that mean this hardware.
        devices_per_chip: JAX devices.
        cores_per_chip: what a size in `cores` counts.
        chips_per_host: of a whole host.
        peak_flops: dtype name (`bfloat16`) -> FLOP/s of one device, dense; empty where there is no figure.
        hbm_bytes: memory of one device that a program can have.
        hbm_bandwidth: bytes/s of one device.
        host_bytes: the share of one device in its host's memory; None where there is no figure.
        link_bandwidth: bytes/s that one device sends within its domain (a TPU slice, an NVLink host), all links together.
        network_bandwidth: bytes/s that one device sends out of its domain.
        topology: `"module:function"`, from a `Machine` to JAX devices that are not here, to compile for; None where
            only the hardware itself will do. It raises `RequestError` where its compiler is not installed.
        domain_shape: `"module:function"`, from a `Machine` to the numbers of chips along each dimension of one domain. None if
            its chips have no such arrangement. It raises `RequestError` if there is no domain of that size.
        lowering: `"module:function"`, from this target to a context manager: the compiler holds it while it lowers a
            program for the target, and no longer. For what JAX's lowering has no other way to be told; None where it needs
            nothing.
        stand_in: why a program compiled so is not the one that runs there; empty where it is.
        compiler_options: for `Lowered.compile`.
        source: where the figures are from.
        summary: one line about the hardware, for listings.
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
    stand_in: str = ""
    compiler_options: Mapping[str, Any] = {}
    examples: tuple[str, ...] = ()
    source: str = ""
    summary: str = ""

    def machine_of(self, devices: int, domains: int = 1) -> Machine | None:
        """The machine of so many JAX devices in equal domains; None where this target has no such size."""
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
        """How a machine of it is named, for people."""
        unit = {"devices": "DEVICES", "chips": "CHIPS[xSLICES]", "cores": "CORES[xSLICES]", "hosts": "CHIPSxHOSTS"}
        return f"{self.name}-{unit[self.size]}"

    def machine(self, name: str) -> Machine:
        """The machine that a name means; `name` is this target's, or starts with it and a dash.

        Raises:
            RequestError: what follows is not a size of this target.
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
            raise RequestError(f"{name!r} is larger than any machine\n    expected: at most {MAX_DEVICES:,} of them")
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
    """A number of chips of one kind, named by what follows the target's name.

    Attributes:
        chips: all of them.
        domains: how many groups of chips have fast links among themselves: slices of a TPU, hosts of GPUs.
    """

    name: str
    target: Target
    chips: int
    domains: int
    chips_per_host: int

    @property
    def devices(self) -> int:
        """JAX devices, all of them."""
        return self.chips * self.target.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        """JAX devices of one host."""
        return self.chips_per_host * self.target.devices_per_chip

    @property
    def devices_per_domain(self) -> int:
        """JAX devices with fast links among themselves."""
        return self.devices // self.domains


@attrs.frozen(kw_only=True)
class Detected:
    """What a job runs on, by what JAX says of its devices.

    Attributes:
        description: for people: `8 x NVIDIA H100 80GB HBM3`.
        machine: its name and target; None where no installed package knows it.
    """

    description: str
    machine: Machine | None
