"""Read the summaries of commands, features, and experiments from their source code, without importing them."""

import ast
import functools
import importlib.machinery
import re
from collections.abc import Mapping
from pathlib import Path

_PARAMETERS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[MBT]) parameters\b")


def summary(value: str) -> str | None:
    """Return the first line of an entry point's docstring.

    Args:
        value: Value of the entry point, `"package.module:attribute"`.

    Returns:
        The line, or None if the source is not found or does not define the object with a docstring.
    """
    text = _docstring(value)
    return text.splitlines()[0] if text else None


def parameter_count(value: str) -> str | None:
    """Return the number of parameters that an experiment's docstring states.

    Args:
        value: Value of the entry point, `"package.module:attribute"`.

    Returns:
        The first number, such as `6.74B` for a docstring with `6.74B parameters`, or None.
    """
    match = _PARAMETERS.search(_docstring(value) or "")
    return match[1] if match else None


def _docstring(value: str) -> str | None:
    module, _, name = value.partition(":")
    definition = _definitions(module.strip()).get(name.strip())
    return (ast.get_docstring(definition) or "").strip() or None if definition else None


@functools.cache
def _definitions(module: str) -> Mapping[str, ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes that a module defines. Empty if the source cannot be read."""
    file = _source(module)
    if file is None:
        return {}
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    return {s.name: s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.ClassDef))}


def _source(module: str) -> Path | None:
    """Return the source file of a module without importing its parent packages, or None."""
    path: list[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        if depth == len(parts):
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        path = list(spec.submodule_search_locations or ())
    return None
