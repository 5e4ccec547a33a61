"""Parse the replica groups of collectives, and map them to mesh axes.

The members of a group are partitions, which JAX numbers in mesh order.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.compose.devices import get_slice_index

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray | None:
    match = _IOTA.search(text)
    if not match:
        return None
    dims = _numbers(match[2])
    order = _numbers(match[3]) if match[3] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(*order).reshape(_numbers(match[1]))


def replica_groups(text: str, devices: int) -> np.ndarray:
    """Parse replica groups into an integer array [groups, members] of partition numbers.

    The supported forms are:

    - `{{0,1},{2,3}}`: explicit groups. `{}` is one group of all partitions.
    - `[2,4]<=[8]` and `[2,4]<=[4,2]T(1,0)`: an iota that is reshaped, transposed and reshaped again.
    - `mesh['x'=2,'y'=4] {'y'}`: the devices of a group differ along these axes. `{'y':(2)2}` names a sub-axis of size 2 that
      follows a sub-axis of size 2.
    - `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}`: the same with a different device order, which may also be
      given as a list.

    Raises:
        ValueError: The text matches none of these forms.
    """
    text = text.strip()
    if text == "{}":
        return np.arange(devices)[None]
    if text.startswith("{"):
        return np.array([_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", text[1:])])
    if text.startswith("["):
        groups = _iota(text)
        if groups is not None:
            return groups
    mesh = _MESH.match(text)
    if not mesh:
        raise ValueError(f"unknown form of replica groups: {text[:80]!r}")
    axes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
    flat = np.arange(math.prod(axes.values()))
    if mesh[2] and (order := _ORDER.match(mesh[2])):
        dims = _numbers(order[1])
        flat = flat.reshape(dims).transpose(*(_numbers(order[2]) if order[2] else range(len(dims)))).reshape(-1)
    elif mesh[2]:
        flat = np.array(_numbers(mesh[2]))
    sizes, grouped = [], []
    parts = {name: (int(before or 1), int(size or axes[name])) for name, before, size in _PART.findall(mesh[3])}
    for name, size in axes.items():
        before, part = parts.get(name, (1, 1))
        sizes += [before, part, size // before // part]
        grouped += [False, name in parts, False]
    inner = [i for i, g in enumerate(grouped) if g]
    outer = [i for i, g in enumerate(grouped) if not g]
    members = math.prod(sizes[i] for i in inner)
    return flat.reshape(sizes).transpose(*outer, *inner).reshape(-1, members)


def pairs(text: str) -> np.ndarray:
    """Parse `source_target_pairs={{0,1},{1,0}}` into an integer array [pairs, 2]."""
    return np.array(_numbers(text)).reshape(-1, 2)


@attrs.frozen(eq=False)
class Places:
    """The mesh and the link domains of a program's partitions.

    Attributes:
        shape: Mesh axis -> size, outermost axis first.
        domains: Index of each partition's link domain, in mesh order.
    """

    shape: Mapping[str, int]
    domains: np.ndarray

    def axes(self, members: np.ndarray) -> str:
        """Return the mesh axes along which the members of a group differ, joined by `+`. Empty for a single member."""
        coordinates = np.unravel_index(members.reshape(-1), tuple(self.shape.values()))
        return "+".join(a for a, c in zip(self.shape, coordinates, strict=True) if len(set(c.tolist())) > 1)

    def spread(self, members: np.ndarray) -> tuple[int, int]:
        """Return (number of domains that a group spans, maximum number of its members in one domain)."""
        _, counts = np.unique(self.domains[members.reshape(-1)], return_counts=True)
        return len(counts), int(counts.max())


def find_domains(devices: Sequence[Any], per_domain: int) -> np.ndarray:
    """Return the link domain of each device: its TPU slice if known, else its number divided by `per_domain`.

    The division is valid because each host numbers its devices consecutively.
    """
    slices = [get_slice_index(d) for d in devices]
    if len(set(slices)) > 1:
        return np.array(slices)
    return np.array([d.id // per_domain for d in devices])
