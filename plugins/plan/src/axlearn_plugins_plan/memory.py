"""Read the device memory that a step needs from a compiled program or from an out-of-memory error."""

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
"""Bytes by which two counts of the arguments may differ. A larger difference means that the dump belongs to a different program."""


@attrs.frozen(kw_only=True)
class Memory:
    """The memory of a program, in bytes per device.

    Attributes:
        arguments: Training state and batch, which outlive a step.
        temporaries: Buffers that exist only during the step: activations, gradients, gathered weights.
        code: The program itself, or 0 if the compiler does not count it.
        capacity: Device memory available to a program. None if unknown.
        out_of_memory: Whether the compiler stopped because the program does not fit.
        is_upper_bound: Whether the temporaries are an upper bound. True on TPUs if the buffer assignment was not read.
        compiler_checks_memory: Whether the compiler rejects programs that do not fit.
    """

    arguments: int
    temporaries: int
    code: int = 0
    capacity: int | None = None
    out_of_memory: bool = False
    is_upper_bound: bool = False
    compiler_checks_memory: bool = False

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.arguments + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """True if the program fits, or if the capacity is unknown and the compiler did not reject the program."""
        return not self.out_of_memory and (
            self.compiler_checks_memory or self.capacity is None or self.total <= self.capacity
        )


def capacity(machine: Machine) -> int | None:
    """Return the device memory that a program can use, in bytes, or None if unknown.

    Virtual CPU devices share the memory of this machine.
    """
    if machine.target.hbm_bytes is not None:
        return int(machine.target.hbm_bytes)
    if machine.target.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // machine.devices
    return None


def shard_bytes(tree: Any) -> int:
    """Return the bytes per device of a tree of abstract arrays with shardings. Arrays in host memory are not counted."""
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


def compiled_memory(compiled: Any, machine: Machine | None, buffers: Buffers | None = None) -> Memory:
    """Return the memory of a compiled program. Results that reuse donated arguments count once.

    Args:
        compiled: The compiled program.
        machine: Machine that it was compiled for.
        buffers: The compiler's buffer assignment, if known. Without it, the temporaries of a TPU program are an upper bound.
    """
    stats = compiled.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes + max(0, fresh)
    refuses = machine is not None and machine.target.platform == "tpu"
    mismatch = buffers is not None and abs(buffers.arguments - arguments) > 0.05 * arguments + _SMALL
    if buffers is not None and not mismatch:
        temporaries = buffers.temporaries
    return Memory(
        arguments=arguments,
        temporaries=temporaries,
        code=stats.generated_code_size_in_bytes,
        capacity=capacity(machine) if machine else None,
        is_upper_bound=refuses and (buffers is None or mismatch),
        compiler_checks_memory=refuses,
    )


def parse_out_of_memory(
    message: str, arguments: int, machine: Machine, buffers: Buffers | None = None
) -> Memory | None:
    """Read how much memory a program needs from a compiler's out-of-memory error.

    Args:
        message: The error message.
        arguments: Bytes of the arguments per device. Used if the message does not report them.
        machine: Machine that the program was compiled for.
        buffers: Buffer assignment that the compiler wrote before it stopped, if known.

    Returns:
        The memory, or None if the compiler stopped for a different reason.
    """
    parts = {name: _bytes(number, unit) for name, number, unit in _PART.findall(message)}
    if match := _TEMPORARIES.search(message) or _USED.search(message):
        used = _bytes(*match.groups()[:2])  # includes the arguments, although one message says temporaries
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
        out_of_memory=True,
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
