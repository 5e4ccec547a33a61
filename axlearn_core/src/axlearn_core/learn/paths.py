"""Pytrees by dotted path: `decoder.layer.attention.query`, of any containers.

Parameters may be an `nnx.State` of variables or plain nested dicts of arrays; both give the same paths.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from axlearn_core.config import matches
from axlearn_core.errors import RequestError, nearest


def path_of(keys: Iterable[Any]) -> str:
    """JAX's key path, dotted."""
    return ".".join(str(_name(k)) for k in keys)


def _name(key: object) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)


def flatten(tree: object) -> dict[str, Any]:
    """Dotted path -> leaf, in the tree's order; variables give their arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    return {path_of(k): v.get_value() if _is_variable(v) else v for k, v in leaves}


def unflatten(like: object, leaves: Mapping[str, Any]) -> Any:
    """A tree like `like` with the leaves of `leaves` where it has them, and those of `like` elsewhere."""

    def pick(keys: Any, old: Any) -> Any:
        path = path_of(keys)
        if path not in leaves:
            return old
        return old.replace(leaves[path]) if _is_variable(old) else leaves[path]

    return jax.tree_util.tree_map_with_path(pick, like, is_leaf=_is_variable)


def fitting(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that fit a pattern of `*` and `**`; with a leading `!`, those that do not."""
    negated, plain = pattern.startswith("!"), pattern.removeprefix("!")
    return [path for path in paths if matches(plain, path) != negated]


def select(pattern: str, paths: Iterable[str], *, setting: str) -> list[str]:
    """The paths that fit a pattern of `*` and `**`; with a leading `!`, those that do not.

    Raises:
        RequestError: none does; names the nearest.
    """
    paths = list(paths)
    negated, plain = pattern.startswith("!"), pattern.removeprefix("!")
    matching_paths = fitting(pattern, paths)
    if not matching_paths:
        plain = plain.replace("**.", "").replace(".**", "")
        by_tail = {
            p.split(".", p.count(".") - plain.count("."))[-1]: p for p in paths if p.count(".") >= plain.count(".")
        }
        close = [by_tail[n] for n in nearest(plain, by_tail)] or list(nearest(plain, paths))
        raise RequestError(
            f"{setting}: the pattern {pattern!r} {'leaves' if negated else 'matches'} no parameter\n"
            f"    nearest: {', '.join(close or paths[:5])}\n"
            "    fix: `*` stands for one part of a dotted path, `**` for any number of parts"
        )
    return matching_paths
