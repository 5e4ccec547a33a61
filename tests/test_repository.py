"""What the repository promises about itself."""

import ast
import importlib
import io
import re
import textwrap
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
SHIPPED = [p for p in SOURCES if "src" in p.relative_to(ROOT).parts]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = scope.body[0] if scope.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_the_core_stays_small():
    files = (ROOT / "axlearn_core/src/axlearn_core").rglob("*.py")
    # The suites in testing/ are for the tests of plugin authors: no run imports them.
    core = sum(code_lines(p.read_text()) for p in files if "testing" not in p.parts)
    # It writes, hashes, owns, locks and mirrors runs on every storage, records where the time of a run goes, and bounds and checks
    # what strangers give it. What grows past this gets a second look: is it a plugin's?
    assert core <= 9800


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_grows_long(path):
    assert len(path.read_text().splitlines()) <= 400


def test_only_compose_compiles():
    """A model that is compiled elsewhere runs outside of the mesh, the rules and the choice of kernels."""
    compilers = {"jit", "pjit", "pmap", "lower"}
    elsewhere = []
    for path in SHIPPED:
        if {"compose", "testing"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "name", None)
            if name not in compilers or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            if name != "lower" or not _is_of_text(node, path):
                elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert elsewhere == []


def _is_of_text(node, path):
    """Whether `x.lower` is of a string, or asks a program: nothing else is called without arguments, or with a name."""
    line = path.read_text().splitlines()[node.lineno - 1]
    return ".lower()" in line or "program.lower(" in line


PRIVATE = re.compile(r"\b(jax|qwix|tokamax|flax|optax|orbax)\._src\b|\bjaxlib\._jax\b|^unittest(\.mock)?$")
"""Modules that libraries do not promise, and what only tests replace things with."""


def gaps(source):
    """(line, what) of each private module that a source names, and each change of the environment."""
    tree = ast.parse(source)
    docstrings = {id(n.body[0].value) for n in ast.walk(tree) if hasattr(n, "body") and _begins_with_text(n)}
    for node in ast.walk(tree):
        names = [getattr(node, "module", None) or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.append(node.value)
        yield from ((node.lineno, name) for name in names if PRIVATE.search(name))
        if _changes_environment(node):
            yield node.lineno, "environment"


def _begins_with_text(node):
    first = node.body[0] if isinstance(node.body, list) and node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


def _changes_environment(node):
    written = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    if any(isinstance(t, ast.Subscript) and ast.unparse(t.value) == "os.environ" for t in written):
        return True
    if not isinstance(node, ast.Call):
        return False
    changing = {"os.putenv", "os.unsetenv", *(f"os.environ.{m}" for m in ("setdefault", "update", "pop", "clear"))}
    return ast.unparse(node.func) in changing


@pytest.mark.parametrize(
    "planted",
    [
        "from jax._src import core",
        "import jax._src.core",
        "x = importlib.import_module('jax._src.core')",
        "x = importlib.import_module(f'tokamax._src.{name}')",
        "from jaxlib._jax import config",
        "from unittest import mock",
        "import unittest.mock",
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.setdefault('A', '1')",
        "import os\ndel os.environ['A']",
    ],
)
def test_what_libraries_do_not_give_is_found(planted):
    assert list(gaps(planted))


def test_what_libraries_do_give_is_none_of_it():
    source = """
        'From `jax._src` in a docstring.'
        import os
        from jax.experimental import topologies
        environment = os.environ | {"A": "1"}
        value = os.environ["A"], os.environ.get("B")
    """
    assert not list(gaps(textwrap.dedent(source)))


def test_what_libraries_do_not_give_stands_in_one_module_of_a_distribution():
    elsewhere = []
    for path in SHIPPED:
        if path.name != "compat.py" and "testing" not in path.parts:
            elsewhere += [f"{path.relative_to(ROOT)}:{line} {what}" for line, what in gaps(path.read_text())]
    assert elsewhere == []


def projects():
    """Name of each distribution -> its `[project]`."""
    files = [f for folder in ("", "plugins") for f in (ROOT / folder).glob("*/pyproject.toml")]
    found = [tomllib.loads(f.read_text())["project"] for f in files]
    return {project["name"]: project for project in found}


def names(requirements):
    return {re.split(r"[<>=\[ ;]", r)[0] for r in requirements}


def test_all_is_all():
    known = projects()
    every = names(known["axlearn-core"]["optional-dependencies"]["all"])
    assert every == set(known) - {"axlearn-core"}
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert workspace["dependencies"] == ["axlearn-core[all]"]  # a clone has what an installation has


@pytest.mark.parametrize("backend", ["gpu", "neuron", "tpu"])
def test_a_backend_requires_what_its_mesh_rules_name(backend):
    known = projects()
    rules = importlib.import_module(f"axlearn_plugins_{backend}.rules")
    required = names(known[f"axlearn-plugins-{backend}"]["dependencies"])
    assert {"axlearn-plugins-llama", "axlearn-plugins-plan", *rules.PACKAGES.values()} <= required


def test_every_distribution_has_its_license_and_readme():
    for project in [p.parent for folder in ("", "plugins") for p in (ROOT / folder).glob("*/pyproject.toml")]:
        assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text(), project
        assert len((project / "README.md").read_text().splitlines()) > 3, project
