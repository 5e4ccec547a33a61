"""The largest values of all processes, by a device collective in which each process exchanges a constant number of bytes."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_core.compose.functions import array_function


def max_over_processes(values: Sequence[int]) -> list[int]:
    """Return the largest of each value over all processes. All processes must call it together.

    Args:
        values: int32 values, equally many on every process.
    """
    mesh, reduce = _max_function()
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    row = np.asarray(values, np.int32)[None]
    rows = jax.make_array_from_process_local_data(sharding, row, (jax.process_count(), len(values)))
    return [int(value) for value in np.asarray(reduce(rows).addressable_shards[0].data)[0]]


@functools.cache
def _max_function() -> tuple[Mesh, jax.stages.Wrapped]:
    """Return a mesh of one device per process, and a compiled function that replaces each row by the maximum of all rows."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in range(jax.process_count())]), ("process",))
    spec = PartitionSpec("process")

    def reduce(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, "process")

    return mesh, array_function()(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec))
