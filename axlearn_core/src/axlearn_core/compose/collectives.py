"""Bytes from process to process over the links of the devices: no network service, and nothing to authenticate."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Pairs = tuple[tuple[int, int], ...]
"""(source, destination) process indices; a process is the source of one pair at most, and the destination of one."""


def exchange_bytes(chunk: np.ndarray, pairs: Pairs) -> np.ndarray:
    """What the source paired with this process passed; zeros where there is none. All processes call it together.

    Args:
        chunk: uint8 [n], with the same n on every process.
        pairs: the same on every process.
    """
    mesh, permute = _permutation(pairs)
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    buffer = jax.make_array_from_process_local_data(sharding, chunk[None], (jax.process_count(), chunk.size))
    return np.asarray(permute(buffer).addressable_shards[0].data)[0]


@functools.cache
def _permutation(pairs: Pairs) -> tuple[Mesh, jax.stages.Wrapped]:
    """A device of each process, and the program that passes a row of each along the pairs."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in range(jax.process_count())]), ("process",))
    spec = PartitionSpec("process")

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "process", pairs)

    return mesh, jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
