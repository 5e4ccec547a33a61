"""What a compiled step takes of a device's memory, and what a compiler says when it does not fit."""

import os
import re
from typing import Any

import attrs
import jax

from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.buffers import Buffers

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_PART = re.compile(rf"^\s*(program|arguments)\s+{_SIZE}\b", re.M)
_HOST = ("pinned_host", "unpinned_host")
_SMALL = 2**20
"""Bytes by which what counts as an argument may differ; more is another program's."""


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of one device.

    Attributes:
        arguments: the training state and the batch, which outlast a step.
        temporaries: what exists during the step only: activations, gradients, gathered weights.
        code: the program itself, where the compiler counts it.
        capacity: what the device has for a program; None where that is not known.
        refused: whether the compiler stopped because it does not fit.
        at_most: whether the temporaries are an upper bound: of a program for TPUs whose layout of buffers was not read.
        compiled: whether a compiler that refuses what does not fit has compiled it.
    """

    arguments: int
    temporaries: int
    code: int = 0
    capacity: int | None = None
    refused: bool = False
    at_most: bool = False
    compiled: bool = False

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether it does; where the capacity is not known, nothing says that it does not."""
        return not self.refused and (self.compiled or self.capacity is None or self.total <= self.capacity)


def capacity(machine: Machine) -> int | None:
    """What one device of a machine has for a program. Devices of a CPU share the memory of this one."""
    if machine.target.hbm_bytes is not None:
        return int(machine.target.hbm_bytes)
    if machine.target.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // machine.devices
    return None


def shard_bytes(tree: Any) -> int:
    """What the memory of one device holds of a tree of abstract arrays with shardings: what is in its host's is not counted."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding is not None and leaf.sharding.memory_kind in _HOST:
            continue
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        size = leaf.dtype.itemsize
        for dim in shape:
            size *= dim
        total += size
    return total


def of_compiled(compiled: Any, machine: Machine | None, buffers: Buffers | None = None) -> Memory:
    """As the compiler counts it. Results that take the place of donated arguments count once.

    Args:
        compiled: the program.
        machine: what it was compiled for.
        buffers: as the compiler laid them out, where that is known. Without them the temporaries of a program for TPUs are an
            upper bound.
    """
    stats = compiled.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes + max(0, fresh)
    refuses = machine is not None and machine.target.platform == "tpu"
    of_another = buffers is not None and abs(buffers.arguments - arguments) > 0.05 * arguments + _SMALL
    if buffers is not None and not of_another:
        temporaries = buffers.temporaries
    return Memory(
        arguments=arguments,
        temporaries=temporaries,
        code=stats.generated_code_size_in_bytes,
        capacity=capacity(machine) if machine else None,
        at_most=refuses and (buffers is None or of_another),
        compiled=refuses,
    )


def of_refusal(message: str, arguments: int, machine: Machine, buffers: Buffers | None = None) -> Memory | None:
    """What a compiler that ran out of device memory says of it; None where it stopped for another reason.

    Args:
        message: of the error.
        arguments: bytes of one device, for messages that do not tell.
        machine: what it compiled for.
        buffers: as the compiler laid them out before it stopped, where that is known.
    """
    parts = {name: _bytes(number, unit) for name, number, unit in _PART.findall(message)}
    if match := _TEMPORARIES.search(message) or _USED.search(message):
        used = _bytes(*match.groups()[:2])  # arguments included, though one message says temporaries
    else:
        return None
    arguments = parts.get("arguments", arguments)
    temporaries = parts.get("program", used - arguments)
    if buffers is not None:
        arguments, temporaries = buffers.arguments, buffers.temporaries
    return Memory(
        arguments=arguments,
        temporaries=max(0, temporaries),
        capacity=capacity(machine),
        refused=True,
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
