"""Kernels on several devices: each runs on its own part of the activations."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axlearn_core.nn.sharding import placement


def per_device(
    function: Callable[..., Any], operands: Sequence[Sequence[str | None] | None], result: Sequence[str | None]
) -> Callable[..., Any]:
    """`function` run by every device on its own part of the operands: for kernels, which the compiler cannot partition.

    Args:
        function: of arrays (or None), to one array.
        operands: the logical axes of each operand; None for an operand that is None.
        result: the logical axes of the result, whose dimensions are split as those of the operands with the same names.
    """
    found = placement()
    if found is None:
        return function

    def run(*args: jax.Array | None) -> Any:
        specs = tuple(
            PartitionSpec() if x is None else found.spec(x.shape, a or ()) for x, a in zip(args, operands, strict=True)
        )
        split: dict[str, Any] = {}
        for axes, spec in zip(operands, specs, strict=True):
            for name, part in zip(axes or (), spec, strict=False):
                if name is not None:
                    split.setdefault(name, part)
        made = PartitionSpec(*(split.get(name or "") for name in result))
        return jax.shard_map(function, mesh=found.mesh, in_specs=specs, out_specs=made, check_vma=False)(*args)

    return run
