"""Weights of a training state on the devices of one process, for a program that each process of a job runs alone."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from axlearn_core.compose.functional import ModelWeights
from axlearn_core.compose.functions import array_function
from axlearn_core.compose.layout import Layout
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.compose.program import Program, array_shardings
from axlearn_core.errors import ConfigError, Problem

Owner = Callable[[Any], int]
"""Function that returns the process of a device."""


def _process(device: Any) -> int:
    return device.process_index


class ProcessWeights:
    """Brings the weights of a training program to the devices of this process.

    Every process gets all weights, sharded over its own devices. In a job with one process, the weights stay as they are.

    Args:
        program: The training program.
        owner: Returns the process of a device.
        index: Index of this process. The default is JAX's.

    Attributes:
        program: Program on the devices of this process. In a job with one process, it is the training program.
    """

    def __init__(self, program: Program, *, owner: Owner = _process, index: int | None = None):
        self.program: Program | ModelProgram = program
        mesh = program.layout.mesh
        self._is_alone = len({owner(device) for device in mesh.devices.flat}) == 1
        if self._is_alone:
            return
        blocks = split_mesh(mesh, owner)
        local = local_mesh(blocks, owner, jax.process_index() if index is None else index)
        config = attrs.evolve(program.mesh, shape={axis: n for axis, n in local.shape.items() if n > 1})
        functional = program.functional
        self.program = ModelProgram(functional, list(local.devices.flat), config, program.target)
        self._devices = list(local.devices.flat)
        places = array_shardings(functional, Layout(local, config))
        self._local: Mapping[str, NamedSharding] = places
        self._copies = {path: NamedSharding(blocks, place.spec) for path, place in places.items()}
        self._gathers: dict[tuple[str, ...], Callable[[Any], Any]] = {}

    def fetch(self, weights: ModelWeights, *, copy: bool = False) -> ModelWeights:
        """Return weights on the devices of this process. All processes must call this together.

        Arrays that already have their layout on these devices are not copied.

        Args:
            weights: Weights with the paths and shapes of the program's model.
            copy: Whether to copy these arrays too, so that they stay valid if a training step donates `weights`.
        """
        if self._is_alone:
            return _copy(weights) if copy else weights
        arrays = {**weights.params, **weights.variables}
        moved = {p: x for p, x in arrays.items() if not x.sharding.is_equivalent_to(self._copies[p], x.ndim)}
        gathered = self._gather(tuple(moved))(moved) if moved else {}
        local = {path: self._localize(path, gathered.get(path, x)) for path, x in arrays.items()}
        if copy:
            local |= _copy({path: x for path, x in local.items() if path not in moved})
        return ModelWeights({p: local[p] for p in weights.params}, {p: local[p] for p in weights.variables})

    def _gather(self, paths: tuple[str, ...]) -> Callable[[Any], Any]:
        """Return the function that gives each process a copy of arrays."""
        if paths not in self._gathers:
            shardings = {path: self._copies[path] for path in paths}
            self._gathers[paths] = jax.jit(lambda arrays: arrays, out_shardings=shardings)
        return self._gathers[paths]

    def _localize(self, path: str, array: jax.Array) -> jax.Array:
        """Return the shards on the devices of this process as an array that no other process is part of."""
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            array.shape, self._local[path], [shards[d] for d in self._devices]
        )


@array_function()
def _copy(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def split_mesh(mesh: Any, owner: Owner = _process) -> Any:
    """Split each axis of a mesh into the part across processes, `<axis>_across`, and the part within a process, `<axis>`.

    The order of the devices does not change.

    Args:
        mesh: Mesh over the devices of several processes.
        owner: Returns the process of a device.

    Raises:
        ConfigError: If the devices of a process are not a block of the mesh.
    """
    owners = np.vectorize(owner, otypes=[int])(mesh.devices)
    indices = np.argwhere(owners == owners.flat[0])
    within = indices.max(0) - indices.min(0) + 1
    shape = [n for size, inner in zip(owners.shape, within, strict=True) for n in (size // inner, inner)]
    names = [name for axis in mesh.axis_names for name in (f"{axis}_across", axis)]
    if math.prod(shape) == owners.size:
        grid = _blocks(owners.reshape(shape))
        if (grid == grid[:, :1]).all() and len(grid) == len(set(owners.flat)):
            return jax.sharding.Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    raise ConfigError(
        Problem(
            path="mesh.shape",
            message="the devices of a process are not a block of the mesh, so a process cannot hold the weights alone",
            got=f"{sizes} over {len(set(owners.flat))} processes",
            expected=f"inner axes whose sizes have a product that divides {owners.size // len(set(owners.flat))}",
            fix="remove mesh.shape to put all devices on fsdp",
        )
    )


def local_mesh(blocks: Any, owner: Owner, index: int) -> Any:
    """Return the mesh of one process, which has the axes that are within processes.

    Args:
        blocks: A mesh from `split_mesh`.
        owner: Returns the process of a device.
        index: Index of the process.
    """
    sizes = blocks.devices.shape[1::2]
    devices = next(block for block in _blocks(blocks.devices) if owner(block[0]) == index)
    names = blocks.axis_names[1::2]
    return jax.sharding.Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def _blocks(grid: np.ndarray) -> np.ndarray:
    """Return the entries of each process, [processes, devices], of a grid [across, within, across, within, ...]."""
    axes = range(grid.ndim)
    outer, inner = [*axes[::2]], [*axes[1::2]]
    return grid.transpose(*outer, *inner).reshape(-1, math.prod(grid.shape[1::2]))
