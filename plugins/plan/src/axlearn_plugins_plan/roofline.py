"""Compute a lower bound on the time of a step from the peak rates of the hardware."""

from collections.abc import Mapping, Sequence

import attrs

from axlearn_core.config import get_options
from axlearn_core.contracts.target import Target
from axlearn_plugins_plan.collectives import Collective


@attrs.frozen(kw_only=True)
class Roofline:
    """Seconds per step for each hardware limit. None if the hardware's rate or the program's usage is unknown.

    Attributes:
        compute: Time of the executed FLOPs, spread evenly over the devices, at the peak rates of their dtypes.
        hbm: Time to read and write device memory at its bandwidth.
        links: Time to send data within the domain at the bandwidth of a device's links.
        network: Time to send data to other domains at the network bandwidth.
    """

    compute: float | None
    hbm: float | None
    links: float | None
    network: float | None

    @property
    def step(self) -> float | None:
        """The longest of these times, which is the step time with full overlap. None if the compute time is unknown."""
        times = [t for t in (self.compute, self.hbm, self.links, self.network) if t is not None]
        return max(times) if self.compute is not None else None

    @property
    def serial(self) -> float | None:
        """Step time if communication does not overlap with compute and memory access. None if the compute time is unknown."""
        if self.compute is None:
            return None
        return max(self.compute, self.hbm or 0.0) + max(self.links or 0.0, self.network or 0.0)

    @property
    def bound(self) -> str:
        """Name of the bottleneck, which is the limit that takes the longest."""
        times: dict[str, float] = get_options(self, "compute", "hbm", "links", "network")
        return max(times, key=lambda n: times[n]) if times else "unknown"


def peak(target: Target, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device for matmuls in a dtype.

    Falls back to the bfloat16 peak if the target does not specify a peak for the dtype. Wider dtypes are slower, so the time
    remains a lower bound.
    """
    peak_rate = target.peak_flops.get(dtype)
    if peak_rate is None and dtype.startswith("float8"):
        peak_rate = next((p for d, p in target.peak_flops.items() if d.startswith(("float8", "fp8"))), None)
    return peak_rate if peak_rate is not None else target.peak_flops.get("bfloat16")


def roofline(
    target: Target,
    devices: int,
    executed: Mapping[str, float],
    moved: float | None,
    items: Sequence[Collective] | None,
) -> Roofline:
    """Compute the time that each hardware limit imposes on a step.

    Args:
        target: The hardware.
        devices: Number of devices.
        executed: dtype -> FLOPs on all devices.
        moved: Bytes that one device reads from and writes to its memory. None if unknown.
        items: Collectives of the step. None if unknown.
    """
    peaks = {dtype: peak(target, dtype) for dtype in executed}
    compute = None
    if target.peak_flops:
        compute = sum(flops / devices / (peaks[dtype] or float("inf")) for dtype, flops in executed.items())
    link = sum(c.times * c.link_bytes for c in items) if items is not None else None
    network = sum(c.times * c.network_bytes for c in items) if items is not None else None
    return Roofline(
        compute=compute,
        hbm=_seconds(moved, target.hbm_bandwidth),
        links=_seconds(link, target.link_bandwidth),
        network=_seconds(network, target.network_bandwidth),
    )


def _seconds(size: float | None, bandwidth: float | None) -> float | None:
    if size == 0:
        return 0.0
    return None if size is None or not bandwidth else size / bandwidth


def utilisation(flops: float, seconds: float | None, target: Target, devices: int) -> float | None:
    """Return the model FLOPs utilization, relative to the bfloat16 peak of all devices."""
    best = target.peak_flops.get("bfloat16")
    return None if not seconds or not best else flops / seconds / (best * devices)
