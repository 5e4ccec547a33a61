"""How MaxText and Tunix lay out parameters in an Orbax checkpoint, and which arrays of one are parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import jax.numpy as jnp

from axlearn_core.errors import RequestError


@attrs.frozen
class TreeLayout:
    """Where a project keeps parameters in a checkpoint.

    Attributes:
        name: of the project, as the command line takes it.
        item: the name of Orbax's item.
        pack: (nested parameters, step) -> the tree of the item.
        prefix: what the dotted path of each parameter begins with.
        suffix: what it ends with.
    """

    name: str
    item: str
    pack: Callable[[dict[str, Any], int], dict[str, Any]]
    prefix: str = ""
    suffix: str = ""

    def params(self, paths: Iterable[str]) -> dict[str, str]:
        """Path of a parameter in the model -> path in the checkpoint; leaves out what is not a parameter."""
        fitting = (p for p in paths if p.startswith(self.prefix) and p.endswith(self.suffix))
        return {p[len(self.prefix) : len(p) - len(self.suffix)]: p for p in fitting}


def nest(arrays: Mapping[str, Any], leaf: str | None = None) -> dict[str, Any]:
    """Nested dicts of arrays by dotted path.

    Args:
        arrays: by dotted path.
        leaf: wraps each array in a dict with this key.

    Raises:
        RequestError: one path is the beginning of another one.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node, (*parents, name) = tree, path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise _nesting_error(path)
        if name in node:
            raise _nesting_error(path)
        node[name] = array
    return _wrap(tree, leaf) if leaf else tree


def _wrap(tree: Any, leaf: str) -> Any:
    return {k: _wrap(v, leaf) for k, v in tree.items()} if isinstance(tree, dict) else {leaf: tree}


def _nesting_error(path: str) -> RequestError:
    return RequestError(
        f"{path} is both an array and the beginning of another array's path: nested dicts cannot hold both\n"
        "    fix: rename one of the two variables in the model"
    )


def _train_state(params: dict[str, Any], step: int) -> dict[str, Any]:
    # MaxText reads the collection `params` of Flax below the field `params` of its training state.
    return {"step": jnp.asarray(step, jnp.int32), "params": {"params": params}}


def _nnx_state(params: dict[str, Any], step: int) -> dict[str, Any]:
    # In an `nnx.State`, as Tunix saves it, each variable is a node with its array at `value`.
    return _wrap(params, "value")


LAYOUTS = {
    layout.name: layout
    for layout in (
        TreeLayout("maxtext", "items", _train_state, prefix="params.params."),
        TreeLayout("tunix", "model_params", _nnx_state, suffix=".value"),
        TreeLayout("plain", "state", lambda params, step: params),
    )
}
"""Layouts by name; the first one that a checkpoint fits is the one that it has."""


def find_layout(item: str | None, paths: Iterable[str]) -> TreeLayout:
    """The layout of a checkpoint, by the paths of its arrays."""
    paths = list(paths)
    if any(p.startswith(LAYOUTS["maxtext"].prefix) for p in paths):
        return LAYOUTS["maxtext"]
    if item == LAYOUTS["tunix"].item or (paths and all(p.endswith(LAYOUTS["tunix"].suffix) for p in paths)):
        return LAYOUTS["tunix"]
    return LAYOUTS["plain"]
