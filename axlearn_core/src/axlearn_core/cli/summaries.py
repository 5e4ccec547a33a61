"""The line of a plugin's command in `axlearn --help`: read from its source, which is not imported."""

import ast
import importlib.machinery
from pathlib import Path


def summary(value: str) -> str | None:
    """The first line of the docstring of what an entry point names.

    Args:
        value: `"package.module:function"`.

    Returns:
        The line; None where the source is not found or has none, such as of a command that is built by a call.
    """
    module, _, name = value.partition(":")
    file = _source(module.strip())
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name.strip():
            text = ast.get_docstring(statement)
            return text.strip().splitlines()[0] if text and text.strip() else None
    return None


def _source(module: str) -> Path | None:
    """The file of a module, found as an import finds it but with none of its parents run."""
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
