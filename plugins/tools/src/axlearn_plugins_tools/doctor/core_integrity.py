"""Detect functions and classes of the core that a plugin has replaced.

Such a replacement silently changes the results of other plugins.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from axlearn_core.contracts.finding import Finding
from axlearn_core.plugins.registry import CORE, core_version

PACKAGE = "axlearn_core"


def find_replaced_attributes() -> Iterator[Finding]:
    """Yield an error for each part of the core that differs from its source file."""
    for name, replacement in replaced_attributes():
        yield Finding(
            name=name,
            group="core",
            distribution=CORE,
            version=core_version(),
            status="error",
            message=f"differs from the core's definition\n    got: {replacement}\n    fix: uninstall the package that replaces it",
        )


def replaced_attributes() -> Iterator[tuple[str, str]]:
    """Yield the replaced functions, methods and classes of the core.

    Compares the source file of each imported core module with the module's members, so it finds replacements regardless of when
    they were made. Ignores decorated functions and methods.

    Yields:
        The dotted name, and a description of the current value.
    """
    for name, module in sorted(sys.modules.items()):
        if (name == PACKAGE or name.startswith(f"{PACKAGE}.")) and "__file__" in vars(module):
            yield from _replaced_in_module(name, module)


def _replaced_in_module(name: str, module: ModuleType) -> Iterator[tuple[str, str]]:
    file = str(module.__file__)
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return
    yield from _replaced_in_body(body, vars(module), name, file)


def _replaced_in_body(body: list[ast.stmt], members: Any, path: str, file: str) -> Iterator[tuple[str, str]]:
    last = {s.name: s for s in body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    for name, statement in last.items():
        value = members.get(name)
        if isinstance(statement, ast.ClassDef):
            if not inspect.isclass(value) or (not statement.decorator_list and value.__module__ != _module(path)):
                yield f"{path}.{name}", _origin(value)
            else:
                yield from _replaced_in_body(statement.body, vars(value), f"{path}.{name}", file)
        elif not statement.decorator_list and not _is_from(value, file):
            yield f"{path}.{name}", _origin(value)


def _module(path: str) -> str:
    """Return the name of the module that contains a dotted name."""
    while path not in sys.modules:
        path = path.rpartition(".")[0]
    return path


def _is_from(value: object, file: str) -> bool:
    value = _unwrap_function(value)
    return isinstance(value, FunctionType) and value.__code__.co_filename == file


def _origin(value: object) -> str:
    function = _unwrap_function(value)
    if isinstance(function, FunctionType):
        return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    return "nothing" if value is None else f"{value.__module__}: {value!r}"[:120]


def _unwrap_function(value: object) -> object:
    """Return the function that a class method wraps.

    Python turns some methods into class methods implicitly.
    """
    return value.__func__ if isinstance(value, classmethod | staticmethod | MethodType) else value
