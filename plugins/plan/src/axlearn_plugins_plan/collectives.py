"""Read the collectives of a program from its optimized module."""

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from axlearn_plugins_plan.groups import Places, pairs, replica_groups
from axlearn_plugins_plan.hlo import Computation, Instruction, Module

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
"""The attribute of a send between TPU slices that names its collective."""
_ALL_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}')
_SOME_SLICES = re.compile(r"_xla_megascale_target=\{\{([\d,]+|\d+->\d+)\}")
_SLICE = 100_000
"""The device numbers in a target encode the slice number, counted from 1, as a multiple of this number."""


@attrs.frozen(kw_only=True)
class Collective:
    """A collective in a module, from the perspective of a single device.

    Attributes:
        kind: One of `KINDS`.
        axes: Mesh axes that the collective communicates over, joined by `+`.
        size: Number of devices in a group.
        times: Number of executions per step.
        operand_bytes: Bytes of the operand on one device, per execution.
        link_bytes: Bytes that one device sends over links inside its domain, per execution.
        network_bytes: Bytes that one device sends to other domains, per execution.
        asynchronous: Whether the program continues while the collective runs.
    """

    name: str
    kind: str
    axes: str
    size: int
    times: float
    operand_bytes: int
    link_bytes: float
    network_bytes: float
    asynchronous: bool

    @property
    def bytes(self) -> float:
        """Bytes that one device sends per step, over links or over the network, whichever is larger."""
        return self.times * max(self.link_bytes, self.network_bytes)


def bytes_sent(kind: str, operand_bytes: float, size: int) -> float:
    """Return the bytes that each of `size` devices sends with a bandwidth-optimal ring algorithm (Thakur et al., 2005)."""
    if size < 2:
        return 0.0
    if kind == "all-gather":
        return operand_bytes * (size - 1)
    if kind == "all-reduce":
        return 2 * operand_bytes * (size - 1) / size
    if kind in ("collective-permute", "collective-broadcast"):
        return float(operand_bytes)
    return operand_bytes * (size - 1) / size  # reduce-scatter, all-to-all


def collectives(module: Module, places: Places) -> list[Collective]:
    """Return all collectives that move data, in program order.

    Includes collectives inside fusions and asynchronous computations.

    Raises:
        ValueError: The module has replica groups in an unknown format.
    """
    result = []
    for computation, times in module.scheduled_computations():
        channels: set[str] = set()
        for outer in computation.instructions.values():
            for inside, instruction in _parts(module, computation, outer):
                if instruction.opcode == "send" and (between := _BETWEEN.search(instruction.rest)):
                    result.append(_between_slices(instruction, inside, places, times, between[1]))
                kind = instruction.opcode.removesuffix("-start")
                if kind not in KINDS:
                    continue
                # A collective that is spread over several fusions has the same channel in each of them.
                channel = instruction.attribute("channel_id")
                if instruction is not outer and channel is not None:
                    if channel in channels:
                        continue
                    channels.add(channel)
                if kind == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # TPU programs express it as a fusion of an all-reduce and a slice
                is_async = "async" in inside.name or (
                    outer.opcode.endswith("-start") and '"is_sync":true' not in outer.rest
                )
                result += _collective(kind, instruction, inside, places, times, is_async)
    return result


def _parts(module: Module, computation: Computation, outer: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    if outer.opcode in ("fusion", "async-start", "call-start"):  # `call-start` runs on the sparse cores
        yield from module.inside(outer)
    else:
        yield computation, outer


def _collective(
    kind: str, instruction: Instruction, inside: Computation, places: Places, times: float, is_async: bool
) -> Iterator[Collective]:
    operands = [inside.instructions[o] for o in instruction.operands if o in inside.instructions]
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the other operands are offsets, sizes and the output buffer
    size = sum(b.bytes for o in operands for b in o.outputs)
    if kind == "collective-permute":
        routes = pairs(instruction.attribute("source_target_pairs") or "")
        routes = routes[routes[:, 0] != routes[:, 1]]
        if not len(routes):
            return
        crosses = bool(np.any(places.domains[routes[:, 0]] != places.domains[routes[:, 1]]))
        axes = {places.axes(route) for route in routes}
        link, network, members = (0.0, float(size), 2) if crosses else (float(size), 0.0, 2)
        name = "+".join(a for a in places.shape if any(a in axis.split("+") for axis in axes))
    else:
        groups = replica_groups(instruction.attribute("replica_groups") or "{}", len(places.domains))
        members = groups.shape[1]
        if members < 2:
            return
        link, network = _split(kind, size, members, *places.spread(groups[0]))
        name = places.axes(groups[0])
    yield Collective(
        name=instruction.name,
        kind=kind,
        axes=name,
        size=members,
        times=times,
        operand_bytes=size,
        link_bytes=link,
        network_bytes=network,
        asynchronous=is_async,
    )


def _between_slices(
    instruction: Instruction, inside: Computation, places: Places, times: float, name: str
) -> Collective:
    """Build a collective between TPU slices, which the program delegates to the host. Each device sends its own share.

    Raises:
        ValueError: The target of the transfer has an unknown format.
    """
    if everyone := _ALL_SLICES.search(instruction.rest):
        slices = [int(n) - 1 for n in everyone[1].split(",")]
    elif some := _SOME_SLICES.search(instruction.rest):
        slices = [int(n) // _SLICE - 1 for n in re.findall(r"\d+", some[1])]
    else:
        raise ValueError(f"unknown form of a target between slices: {instruction.rest[:200]!r}")
    size = sum(b.bytes for b in inside.instructions[instruction.operands[0]].outputs)
    kind = name.lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"  # ONE_TO_ONE
    domains, first = np.unique(places.domains, return_index=True)
    return Collective(
        name=instruction.name,
        kind=kind,
        axes=places.axes(first[np.isin(domains, slices)]),
        size=len(slices),
        times=times,
        operand_bytes=size,
        link_bytes=0.0,
        network_bytes=bytes_sent(kind, size, len(slices)),
        asynchronous=True,
    )


def _split(kind: str, size: int, members: int, domains: int, within: int) -> tuple[float, float]:
    """Return (bytes over links, bytes over the network) that one device sends.

    A group that spans several domains has `within` members in each domain. They share the traffic that leaves the domain.
    """
    if domains == 1:
        return bytes_sent(kind, size, members), 0.0
    if "all-to-all" in kind:
        return size * (within - 1) / members, size * (members - within) / members
    link = bytes_sent(kind, size, members) if within > 1 else 0.0
    # Each domain acts as one member. Its operand is the concatenation of its devices' operands.
    domain_size = size * within if kind == "all-gather" else size
    return link, bytes_sent(kind, domain_size, domains) / within


def sum_by_axes(items: Sequence[Collective]) -> Mapping[str, float]:
    """Return a mapping from mesh axes to the bytes that one device sends over those axes per step."""
    total: dict[str, float] = {}
    for collective in items:
        total[collective.axes] = total.get(collective.axes, 0.0) + collective.bytes
    return total
