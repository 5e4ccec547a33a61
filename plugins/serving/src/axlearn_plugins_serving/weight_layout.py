"""How a runner stores the weights of linear maps, and how many rows it multiplies them with at least."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import Node, find

SLOW_TRANSPOSED = ("AuthenticAMD",)
"""Vendors of processors on which XLA multiplies 16 rows faster with [inputs, outputs]: measured on a Xeon and an EPYC of 2022."""

LEAST_ROWS = 64
"""Of every product in the mode `parity`: XLA for CPU multiplies fewer rows by other algorithms. 32 rows are enough for maps that
are 128 wide, and not for those that are 256 wide."""


def stores_transposed(model: Node[Any], devices: Sequence[Any]) -> bool:
    """Whether the maps of a model are stored as [outputs, inputs]: on one CPU, where nothing but the map reads its weight."""
    if len(devices) > 1 or devices[0].platform != "cpu" or processor_vendor() in SLOW_TRANSPOSED:
        return False
    return not any("latent_cache" in {a.name for a in attrs.fields(type(n))} for n in find(model, Node).values())


@functools.cache
def processor_vendor() -> str:
    """What the processor calls its vendor; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
