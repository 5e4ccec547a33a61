"""Kernels on several devices: each runs on its own part of the activations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axlearn_core.nn.sharding import placement


def split_over(shape: Sequence[int], axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that each dimension of an array is split over, by the placement in force.

    Args:
        shape: of the whole array.
        axes: a logical axis for each dimension; None for one that stays whole.

    Returns:
        For each dimension the names of its mesh axes: none where it stays whole, as all do without a placement.
    """
    place = placement()
    parts = (None,) * len(shape) if place is None else place.spec(shape, axes)
    return tuple((p,) if isinstance(p, str) else tuple(p or ()) for p in parts)


def parts_of(shape: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
    """Over how many devices each dimension of an array is split: what a device has of it is the size divided by that.

    Args:
        shape: of the whole array.
        axes: a logical axis for each dimension; None for one that stays whole.
    """
    place = placement()
    over = split_over(shape, axes)
    return tuple(1 if place is None else math.prod(place.mesh.shape[a] for a in names) for names in over)


def per_device(
    function: Callable[..., Any], operands: Sequence[Sequence[str | None] | None], result: Sequence[str | None]
) -> Callable[..., Any]:
    """`function` run by every device on its own part of the operands: for kernels, which the compiler cannot partition.

    Args:
        function: of arrays (or None), to one array.
        operands: the logical axes of each operand; None for an operand that is None.
        result: the logical axes of the result, whose dimensions are split as those of the operands with the same names.
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
