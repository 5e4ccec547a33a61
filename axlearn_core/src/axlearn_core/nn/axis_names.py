"""The logical axis names of a variable: those that its layer declares, and those of the stacks that hold it."""

from typing import Any

from flax import nnx

ONLY_STACKED = "only_stacked"
"""Metadata of a parameter whose layer names no axis: the names that it has are those of stacks."""


def declared_names(variable: Any) -> tuple[str | None, ...] | None:
    """The logical axis names of a variable, one per dimension; None if it has none."""
    meta = variable.get_metadata()
    names = meta.get("out_sharding") or meta.get("sharding_names") or meta.get("sharding")
    return None if names is None else tuple(names)


def is_unnamed(variable: Any) -> bool:
    """Whether the layer of a variable names no axis of it."""
    return declared_names(variable) is None or variable.get_metadata().get(ONLY_STACKED, False)


def name_stack_axis(module: Any, name: str) -> None:
    """Names the leading axis of the stacked parameters of `module`, in place.

    Flax does so for parameters that have names. This adds it to those without, so that their rank in one layer is known.
    """
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and declared_names(variable) is None and variable.get_value().ndim:
            names = (name, *(None,) * (variable.get_value().ndim - 1))
            variable.set_metadata(out_sharding=names, **{ONLY_STACKED: True})
