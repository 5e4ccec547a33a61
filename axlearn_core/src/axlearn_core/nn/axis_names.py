"""Logical axis names of variables, which layers and layer stacks declare."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from axlearn_core.nn.variables import is_variable

BATCH_AXES = ("layers", "experts")
"""Axes over which parameters are stacked."""

ONLY_STACKED = "only_stacked"
"""Metadata key of a parameter whose layer declares no axis names. Its names come from layer stacks."""


def declared_names(variable: Any) -> tuple[str | None, ...] | None:
    """Return the logical axis names of a variable, one per dimension, or None if it has no names."""
    meta = variable.get_metadata()
    names = meta.get("out_sharding") or meta.get("sharding_names") or meta.get("sharding")
    return None if names is None else tuple(names)


def is_unnamed(variable: Any) -> bool:
    """Return True if the layer of a variable does not name its axes."""
    return declared_names(variable) is None or variable.get_metadata().get(ONLY_STACKED, False)


def name_stack_axis(module: Any, name: str) -> None:
    """Name the leading axis of the stacked parameters and variables of `module`, in place.

    Flax names the axis only for those that have names. The others need the name too, because it shows which of their axes is
    the stack axis.
    """
    for _, variable in nnx.iter_graph(module):
        is_state = isinstance(variable, nnx.Param) or is_variable(variable)
        if is_state and declared_names(variable) is None and variable.get_value().ndim:
            names = (name, *(None,) * (variable.get_value().ndim - 1))
            variable.set_metadata(out_sharding=names, **{ONLY_STACKED: True})


def matrix_dimensions(names: Sequence[str | None]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the input and output dimensions of a weight matrix, or None if the parameter is a vector, such as a norm or a bias.

    `layers` and `experts` are batches of matrices, except in the weight of a router, `[embed, experts]`. In a projection back to
    the residual stream, `embed` is the last dimension and is the output. `rank` is the output of the first factor of a factored
    matrix.

    Args:
        names: Logical axis name of each dimension.
    """
    batch = ("layers",) if list(names[-2:]) == ["embed", "experts"] else BATCH_AXES
    dims = [i for i, name in enumerate(names) if name not in batch]
    if len(dims) < 2:
        return None
    into_last = names[dims[-1]] == "rank" or (names[dims[-1]] == "embed" and names[dims[0]] != "embed")
    split = len(dims) - 1 if into_last else 1
    return tuple(dims[:split]), tuple(dims[split:])
