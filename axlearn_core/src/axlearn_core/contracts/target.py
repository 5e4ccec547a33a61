"""What is known of a piece of hardware."""

from collections.abc import Mapping

import attrs


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
