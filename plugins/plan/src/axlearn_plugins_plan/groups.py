"""Who talks to whom in a collective: the forms in which XLA writes replica groups, and the mesh axes that they mean.

A group is of partitions, which JAX numbers in the order of the mesh.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.compose.devices import slice_of

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
    """[groups, members] of partition numbers.

    The forms: `{{0,1},{2,3}}`; `{}` for one group of all; `[2,4]<=[8]` and `[2,4]<=[4,2]T(1,0)`, an iota that is
    reshaped, transposed and reshaped; `mesh['x'=2,'y'=4] {'y'}` and `{'y':(2)2}`, the devices that differ in these axes
    (or in a part of one: of size 2, with 2 before it); `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}`, the same
    with the devices in another order, which may be written out.

    Raises:
        ValueError: it is none of them.
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
        raise ValueError(f"no known form of replica groups: {text[:80]!r}")
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
    """[pairs, 2] of `source_target_pairs={{0,1},{1,0}}`."""
    return np.array(_numbers(text)).reshape(-1, 2)


@attrs.frozen(eq=False)
class Places:
    """Where the partitions of a program are.

    Attributes:
        shape: mesh axis -> size, outermost first.
        domains: of each partition, in the order of the mesh, the number of the group with fast links that it is in.
    """

    shape: Mapping[str, int]
    domains: np.ndarray

    def axes(self, members: np.ndarray) -> str:
        """The mesh axes in which the members of a group differ, joined by `+`; empty where there is one member."""
        coordinates = np.unravel_index(members.reshape(-1), tuple(self.shape.values()))
        return "+".join(a for a, c in zip(self.shape, coordinates, strict=True) if len(set(c.tolist())) > 1)

    def spread(self, members: np.ndarray) -> tuple[int, int]:
        """(the domains that a group is in, the most members in one of them)."""
        _, counts = np.unique(self.domains[members.reshape(-1)], return_counts=True)
        return len(counts), int(counts.max())


def domains_of(devices: Sequence[Any], per_domain: int) -> np.ndarray:
    """Of each device: its TPU slice where it says so, else by its number, since hosts number theirs together."""
    slices = [slice_of(d) for d in devices]
    if len(set(slices)) > 1:
        return np.array(slices)
    return np.array([d.id // per_domain for d in devices])
