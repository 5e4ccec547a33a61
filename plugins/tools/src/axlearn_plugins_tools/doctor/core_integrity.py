"""Checks that the core is what its files say: a plugin that replaces a function of it changes in silence what others compute."""

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
    """An error for each function, method or class of the core that is not the one in its file."""
    for name, replacement in replaced_attributes():
        yield Finding(
            name=name,
            group="core",
            distribution=CORE,
            version=core_version(),
            status="error",
            message=f"it is not what the core defines\n    got: {replacement}\n    fix: leave out the package that replaces it",
        )


def replaced_attributes() -> Iterator[tuple[str, str]]:
    """(dotted name, what stands there now) for each undecorated function, method or class of the imported core modules.

    What a file defines is compared with what its module holds, so that it does not matter when something was replaced.
    """
    for name, module in sorted(sys.modules.items()):
        if (name == PACKAGE or name.startswith(f"{PACKAGE}.")) and "__file__" in vars(module):
            yield from _of_module(name, module)


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[str, str]]:
    file = str(module.__file__)
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return
    yield from _of_body(body, vars(module), name, file)


def _of_body(body: list[ast.stmt], members: Any, path: str, file: str) -> Iterator[tuple[str, str]]:
    last = {s.name: s for s in body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    for name, statement in last.items():
        value = members.get(name)
        if isinstance(statement, ast.ClassDef):
            if not inspect.isclass(value) or (not statement.decorator_list and value.__module__ != _module(path)):
                yield f"{path}.{name}", _origin(value)
            else:
                yield from _of_body(statement.body, vars(value), f"{path}.{name}", file)
        elif not statement.decorator_list and not _is_from(value, file):
            yield f"{path}.{name}", _origin(value)


def _module(path: str) -> str:
    """The module of a dotted name in it."""
    while path not in sys.modules:
        path = path.rpartition(".")[0]
    return path


def _is_from(value: object, file: str) -> bool:
    value = _function_of(value)
    return isinstance(value, FunctionType) and value.__code__.co_filename == file


def _origin(value: object) -> str:
    function = _function_of(value)
    if isinstance(function, FunctionType):
        return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    return "nothing" if value is None else f"{value.__module__}: {value!r}"[:120]


def _function_of(value: object) -> object:
    """The function inside of a class method, of which Python makes some by itself."""
    return value.__func__ if isinstance(value, classmethod | staticmethod | MethodType) else value
