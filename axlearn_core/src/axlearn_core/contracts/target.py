"""What is known of a piece of hardware."""

import re
from collections.abc import Mapping

import attrs

from axlearn_core.errors import RequestError, nearest


@attrs.frozen(kw_only=True)
class Target:
    """Hardware that a program runs on, as far as a plugin knows it.

    Attributes:
        name: what users call it (`h100`).
        device_kinds: the values of `jax.Device.device_kind` that mean this hardware.
        peak_flops: dtype name (`bfloat16`) -> FLOP/s of one device, dense; empty where there is no figure.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops: Mapping[str, float] = {}


def cpu_devices(target: str) -> int:
    """How many virtual devices `cpu` or `cpu-N` asks for.

    Raises:
        RequestError: hardware that this version cannot run on by name.
    """
    found = re.fullmatch(r"cpu(?:-([1-9]\d*))?", target)
    if not found:
        close = nearest(target, ["cpu", "cpu-8"])
        raise RequestError(
            f"unknown target {target!r}\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + "    expected: cpu, or cpu-N for N virtual devices\n"
            "    fix: without a target, training uses the accelerators that JAX finds"
        )
    return int(found[1] or 1)
