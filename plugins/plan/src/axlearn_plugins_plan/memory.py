"""What a compiled step takes of a device's memory, and what a compiler says when it does not fit."""

import os
import re
from typing import Any

import attrs
import jax

from axlearn_core.contracts.target import Machine

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_PART = re.compile(rf"^\s*(program|arguments)\s+{_SIZE}\b", re.M)


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of one device.

    Attributes:
        arguments: the training state and the batch, which outlast a step.
        temporaries: what exists during the step only: activations, gradients, gathered weights.
        code: the program itself, where the compiler counts it.
        capacity: what the device has for a program; None where that is not known.
        refused: whether the compiler stopped because it does not fit.
    """

    arguments: int
    temporaries: int
    code: int = 0
    capacity: int | None = None
    refused: bool = False

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether it does; where the capacity is not known, nothing says that it does not."""
        return not self.refused and (self.capacity is None or self.total <= self.capacity)


def capacity(machine: Machine) -> int | None:
    """What one device of a machine has for a program. Devices of a CPU share the memory of this one."""
    if machine.target.hbm_bytes is not None:
        return int(machine.target.hbm_bytes)
    if machine.target.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // machine.devices
    return None


def shard_bytes(tree: Any) -> int:
    """What one device holds of a tree of abstract arrays with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        size = leaf.dtype.itemsize
        for dim in shape:
            size *= dim
        total += size
    return total


def of_compiled(compiled: Any, machine: Machine | None) -> Memory:
    """As the compiler counts it. Results that take the place of donated arguments count once."""
    stats = compiled.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes + max(0, fresh),
        code=stats.generated_code_size_in_bytes,
        capacity=capacity(machine) if machine else None,
    )


def of_refusal(message: str, arguments: int, machine: Machine) -> Memory | None:
    """What a compiler that ran out of device memory says of it; None where it stopped for another reason.

    Args:
        message: of the error.
        arguments: bytes of one device, for messages that do not tell.
        machine: what it compiled for.
    """
    parts = {name: _bytes(number, unit) for name, number, unit in _PART.findall(message)}
    if match := _TEMPORARIES.search(message):
        temporaries = _bytes(*match.groups()[:2])
    elif match := _USED.search(message):
        temporaries = parts.get("program", _bytes(*match.groups()[:2]) - parts.get("arguments", arguments))
    else:
        return None
    return Memory(
        arguments=parts.get("arguments", arguments),
        temporaries=max(0, temporaries),
        capacity=capacity(machine),
        refused=True,
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
