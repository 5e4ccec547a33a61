"""A training state that is sharded over the processes of a simulated job, with a constant size per process."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_core.checkpoint.manifest import ArrayInfo
from axlearn_core.checkpoint.shards import BinaryFile, Box, Part, render_index

WIDTH = 256
"""Elements of a shard along the axis that is not sharded."""


class HostShard(np.ndarray):
    """The data of a shard, in host memory."""

    def copy_to_host_async(self) -> None:
        """Do nothing, because the data is in host memory."""


@attrs.frozen
class SimulatedShard:
    """A shard on the device of a process, as in `jax.Array.addressable_shards`."""

    index: tuple[slice, ...]
    data: HostShard
    replica_id: int


@attrs.frozen(eq=False)
class SimulatedArray:
    """The part of a `jax.Array` that the code of a save uses, on one process. It is also its own sharding.

    Attributes:
        shape: Shape of the array.
        axis: Axis that is sharded over all processes, or None if the array is replicated.
        processes: Number of processes.
        process: Process that holds the shard.
    """

    shape: tuple[int, ...]
    axis: int | None
    processes: int
    process: int
    dtype: Any = np.dtype(np.float32)
    is_fully_addressable = False

    @property
    def sharding(self) -> "SimulatedArray":
        """The array, which knows its sharding."""
        return self

    @property
    def addressable_shards(self) -> list[SimulatedShard]:
        """The shard of the process."""
        data = np.full(self.shard_shape(self.shape), self.process, self.dtype).view(HostShard)
        replica = self.process if self.axis is None else 0
        return [SimulatedShard(tuple(slice(low, high) for low, high in self.box), data, replica)]

    @property
    def box(self) -> Box:
        """The box of the shard."""
        cell = self.shard_shape(self.shape)
        begins = (self.process * n if axis == self.axis else 0 for axis, n in enumerate(cell))
        return tuple((begin, begin + n) for begin, n in zip(begins, cell, strict=True))

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard."""
        return tuple(n // self.processes if axis == self.axis else n for axis, n in enumerate(shape))


def make_state(processes: int, process: int, *, arrays: int, state_bytes: int) -> dict[str, SimulatedArray]:
    """Return the arrays of a process by path.

    Every third array belongs to the model, and the others to the optimizer. They are sharded over all processes, in turn along
    their first and their second axis. Three small arrays are replicated.

    Args:
        processes: Number of processes.
        process: Index of the process.
        arrays: Number of sharded arrays.
        state_bytes: Bytes of the shards of each process.
    """
    rows = max(1, state_bytes // arrays // WIDTH // 4)
    state = {
        "step": SimulatedArray((), None, processes, process),
        "params.norm.scale": SimulatedArray((WIDTH,), None, processes, process),
        "learner.mean.norm.scale": SimulatedArray((WIDTH,), None, processes, process),
    }
    for number in range(arrays):
        folder = ("params", "learner.mean", "learner.square")[number % 3]
        axis = number % 2
        shape = (rows * processes, WIDTH) if axis == 0 else (WIDTH, rows * processes)
        state[f"{folder}.layer{number // 3}.weight"] = SimulatedArray(shape, axis, processes, process)
    return state


def describe_state(state: Mapping[str, SimulatedArray]) -> dict[str, ArrayInfo]:
    """Return the arrays for a manifest."""
    return {path: ArrayInfo(path, x.shape, str(x.dtype)) for path, x in state.items()}


def render_part(state: Mapping[str, SimulatedArray]) -> bytes:
    """Return the compressed index of a process that writes one file, with hashes of no data."""
    (process,) = {x.process for x in state.values()}
    file, described = BinaryFile(f"weights/{process}-0.bin"), {}
    for path, x in state.items():
        if x.axis is None:
            continue
        cell = x.shard_shape(x.shape)
        size = int(np.prod(cell)) * x.dtype.itemsize
        file.add(Part(path, tuple(low for low, _ in x.box), cell, size, None), 0)
        file.hashes.append(hashlib.sha256(f"{path}{process}".encode()).hexdigest())
        described[path] = {"shape": list(x.shape), "dtype": str(x.dtype), "cell": list(cell)}
    return zlib.compress(render_index(described, [file]), 1)
