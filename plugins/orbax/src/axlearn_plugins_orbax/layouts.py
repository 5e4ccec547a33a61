"""Parameter tree layouts of MaxText, Tunix and plain Orbax checkpoints."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import jax.numpy as jnp

from axlearn_core.errors import RequestError


@attrs.frozen
class TreeLayout:
    """How a project lays out parameters in its checkpoints.

    Attributes:
        name: Name of the project on the command line.
        item: Name of the Orbax item.
        pack: Maps (nested parameters, step) to the tree of the item.
        prefix: Prefix of the dotted path of each parameter.
        suffix: Suffix of the dotted path of each parameter.
    """

    name: str
    item: str
    pack: Callable[[dict[str, Any], int], dict[str, Any]]
    prefix: str = ""
    suffix: str = ""

    def params(self, paths: Iterable[str]) -> dict[str, str]:
        """Map the paths of parameters in the model to their paths in the checkpoint. Ignore other arrays."""
        fitting = (p for p in paths if p.startswith(self.prefix) and p.endswith(self.suffix))
        return {p[len(self.prefix) : len(p) - len(self.suffix)]: p for p in fitting}


def nest(arrays: Mapping[str, Any], leaf: str | None = None) -> dict[str, Any]:
    """Return nested dicts of arrays.

    Args:
        arrays: Arrays keyed by dotted path.
        leaf: Key of a dict that wraps each array, or None.

    Raises:
        RequestError: A path is a prefix of another path.
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
        f"{path} is both an array and a prefix of another array's path, which nested dicts cannot represent\n"
        "    fix: rename one of the two variables in the model"
    )


def _train_state(params: dict[str, Any], step: int) -> dict[str, Any]:
    # MaxText expects Flax's `params` collection in the `params` field of its training state.
    return {"step": jnp.asarray(step, jnp.int32), "params": {"params": params}}


def _nnx_state(params: dict[str, Any], step: int) -> dict[str, Any]:
    # Tunix saves an `nnx.State`, in which each variable is a node with its array in `value`.
    return _wrap(params, "value")


LAYOUTS = {
    layout.name: layout
    for layout in (
        TreeLayout("maxtext", "items", _train_state, prefix="params.params."),
        TreeLayout("tunix", "model_params", _nnx_state, suffix=".value"),
        TreeLayout("plain", "state", lambda params, step: params),
    )
}
"""Layouts by name."""


def find_layout(item: str | None, paths: Iterable[str]) -> TreeLayout:
    """Detect a checkpoint's layout from its item name and array paths."""
    paths = list(paths)
    if any(p.startswith(LAYOUTS["maxtext"].prefix) for p in paths):
        return LAYOUTS["maxtext"]
    if item == LAYOUTS["tunix"].item or (paths and all(p.endswith(LAYOUTS["tunix"].suffix) for p in paths)):
        return LAYOUTS["tunix"]
    return LAYOUTS["plain"]
