"""The parameters and attributes in docstrings exist."""

import ast
import re

import pytest

from support.paths import ROOT, python_files

pytestmark = pytest.mark.style

SHIPPED = [p for p in python_files() if "src" in p.relative_to(ROOT).parts]


def _functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _listed(docstring, heading):
    """Return the names in a section of a docstring."""
    lines = iter((docstring or "").splitlines())
    names = set()
    for line in lines:
        if line.strip() != f"{heading}:":
            continue
        indent = len(line) - len(line.lstrip()) + 4
        for entry in lines:
            if not entry.startswith(" " * indent):
                break
            if match := re.match(r"(\w[\w*`, ]*):( |$)", entry[indent:]):
                names |= {name.strip(" *`") for name in match[1].split(",")}
    return names


def _parameters(function):
    args = function.args
    return {a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg] if a is not None}


def _fields(cls):
    """Return the names that a class or its constructor assigns or defines."""
    names = {n.attr for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    names |= {n.id for n in ast.walk(cls) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {f.name for f in _functions(cls)}


def _undescribed(source):
    """Return the line and name of each documented parameter or attribute that does not exist."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wrong = _listed(ast.get_docstring(node), "Args") - _parameters(node)
        elif isinstance(node, ast.ClassDef):
            init = [p for f in _functions(node) if f.name == "__init__" for p in _parameters(f)]
            wrong = _listed(ast.get_docstring(node), "Args") - _fields(node) - {*init}
            if not node.bases:  # otherwise a base class may have them
                wrong |= _listed(ast.get_docstring(node), "Attributes") - _fields(node)
        else:
            continue
        yield from ((node.lineno, name) for name in wrong)


def test_docstrings_describe_what_is_there():
    planted = 'def f(x, *, y):\n    """Adds.\n\n    Args:\n        x: one.\n        z: more.\n    """\n'
    assert [*_undescribed(planted)] == [(1, "z")]
    listed = [
        name
        for p in SHIPPED
        for f in _functions(ast.parse(p.read_text()))
        for name in _listed(ast.get_docstring(f), "Args")
    ]
    assert len(listed) > 500
    assert [f"{p.relative_to(ROOT)}:{n}: {name}" for p in SHIPPED for n, name in _undescribed(p.read_text())] == []
