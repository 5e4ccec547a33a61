"""Run kernels on several devices, each of which processes its shard of the activations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axlearn_core.nn.sharding import placement


def split_over(shape: Sequence[int], axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes over which each dimension of an array is sharded.

    The current placement determines them.

    Args:
        shape: Global shape.
        axes: Logical axis of each dimension, or None for a dimension that is not sharded.

    Returns:
        Names of the mesh axes for each dimension. The tuple is empty if the dimension is not sharded or there is no
        placement.
    """
    place = placement()
    parts = (None,) * len(shape) if place is None else place.spec(shape, axes)
    return tuple((p,) if isinstance(p, str) else tuple(p or ()) for p in parts)


def count_shards(shape: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
    """Return the number of shards along each dimension of an array.

    Args:
        shape: Global shape.
        axes: Logical axis of each dimension, or None for a dimension that is not sharded.
    """
    place = placement()
    over = split_over(shape, axes)
    return tuple(1 if place is None else math.prod(place.mesh.shape[a] for a in names) for names in over)


def per_device(
    function: Callable[..., Any], operands: Sequence[Sequence[str | None] | None], result: Sequence[str | None]
) -> Callable[..., Any]:
    """Wrap a function so that every device runs it on its shard.

    Use it for kernels, which XLA cannot partition.

    Args:
        function: Function of arrays (or None) that returns one array.
        operands: Logical axes of each operand, or None for an operand that is None.
        result: Logical axes of the result. Dimensions are sharded like the operands' dimensions with the same names.
    """
    place = placement()
    if place is None:
        return function

    def run(*args: jax.Array | None) -> Any:
        specs = tuple(
            PartitionSpec() if x is None else place.spec(x.shape, a or ()) for x, a in zip(args, operands, strict=True)
        )
        split: dict[str, Any] = {}
        for axes, spec in zip(operands, specs, strict=True):
            for name, part in zip(axes or (), spec, strict=False):
                if name is not None:
                    split.setdefault(name, part)
        out_specs = PartitionSpec(*(split.get(name or "") for name in result))
        return jax.shard_map(function, mesh=place.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)

    return run
