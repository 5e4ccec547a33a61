"""The least time that a step can take on some hardware, by what the hardware can do at most."""

from collections.abc import Mapping, Sequence

import attrs

from axlearn_core.config import options_of
from axlearn_core.contracts.target import Target
from axlearn_plugins_plan.collectives import Collective


@attrs.frozen(kw_only=True)
class Roofline:
    """Seconds of one step, by what limits it; None where the figure of the hardware, or of the program, is not known.

    Attributes:
        compute: the executed FLOPs, evenly over the devices, at the peak of their dtypes.
        hbm: the bytes to and from the device's memory at its bandwidth.
        links: the bytes that a device sends within its domain at the bandwidth of its links.
        network: those that it sends out of it.
    """

    compute: float | None
    hbm: float | None
    links: float | None
    network: float | None

    @property
    def step(self) -> float | None:
        """The greatest: everything overlaps. None without a figure for the compute."""
        times = [t for t in (self.compute, self.hbm, self.links, self.network) if t is not None]
        return max(times) if self.compute is not None else None

    @property
    def serial(self) -> float | None:
        """Compute or memory, whichever takes longer, and then communication: nothing of it overlaps."""
        if self.compute is None:
            return None
        return max(self.compute, self.hbm or 0.0) + max(self.links or 0.0, self.network or 0.0)

    @property
    def bound(self) -> str:
        """What the step waits for."""
        times: dict[str, float] = options_of(self, "compute", "hbm", "links", "network")
        return max(times, key=lambda n: times[n]) if times else "unknown"


def peak(target: Target, dtype: str) -> float | None:
    """FLOP/s of one device for products in a dtype; that of bfloat16 where the target has no figure for it.

    Wider types are then taken to be as fast, which they are not: it is a bound from below on the time.
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
    """The bounds of a step.

    Args:
        target: the hardware.
        devices: how many.
        executed: dtype -> FLOPs of all devices.
        moved: bytes of one device to and from its memory; None where no module tells.
        items: the collectives; None where no module tells.
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
    """Model FLOPs utilisation: the share of the bfloat16 peak that model FLOPs in so many seconds are."""
    best = target.peak_flops.get("bfloat16")
    return None if not seconds or not best else flops / seconds / (best * devices)
