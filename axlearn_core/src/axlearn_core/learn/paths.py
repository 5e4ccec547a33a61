"""Address the leaves of pytrees by dotted path: `decoder.layer.attention.query`.

Parameters may be an `nnx.State` or nested dicts of arrays. Both have the same paths.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from axlearn_core.config import matches
from axlearn_core.errors import RequestError, nearest


def format_key_path(keys: Iterable[Any]) -> str:
    """Convert a JAX key path to a dotted path."""
    return ".".join(str(_name(k)) for k in keys)


def _name(key: object) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)


def flatten(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by dotted path, in order. Replace variables with their arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    return {format_key_path(k): v.get_value() if _is_variable(v) else v for k, v in leaves}


def unflatten(like: object, leaves: Mapping[str, Any]) -> Any:
    """Replace leaves of the tree `like` by dotted path. Keep the leaves that are not in `leaves`."""

    def pick(keys: Any, old: Any) -> Any:
        path = format_key_path(keys)
        if path not in leaves:
            return old
        return old.replace(leaves[path]) if _is_variable(old) else leaves[path]

    return jax.tree_util.tree_map_with_path(pick, like, is_leaf=_is_variable)


def match_paths(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that match a pattern.

    Args:
        pattern: `*` matches one part of a path and `**` matches any number of parts. `|` separates alternatives. A leading
            `!` inverts the match of all alternatives: `!a.**|b` matches the paths that neither `a.**` nor `b` matches.
        paths: Dotted paths.
    """
    negated, alternatives = pattern.startswith("!"), pattern.removeprefix("!").split("|")
    return [path for path in paths if any(matches(a, path) for a in alternatives) != negated]


def select(pattern: str, paths: Iterable[str], *, setting: str) -> list[str]:
    """Return the paths that match a pattern; see `match_paths`.

    Raises:
        RequestError: If no path matches. The message lists the nearest paths.
    """
    paths = list(paths)
    matching_paths = match_paths(pattern, paths)
    if not matching_paths:
        negated, plain = pattern.startswith("!"), pattern.removeprefix("!").split("|")[0]
        plain = plain.replace("**.", "").replace(".**", "")
        paths_by_tail = {
            p.split(".", p.count(".") - plain.count("."))[-1]: p for p in paths if p.count(".") >= plain.count(".")
        }
        close = [paths_by_tail[n] for n in nearest(plain, paths_by_tail)] or list(nearest(plain, paths))
        raise RequestError(
            f"{setting}: the pattern {pattern!r} {'leaves' if negated else 'matches'} no parameter\n"
            f"    nearest: {', '.join(close or paths[:5])}\n"
            "    fix: `*` matches one part of a dotted path, `**` matches any number of parts, and `|` separates alternatives"
        )
    return matching_paths
