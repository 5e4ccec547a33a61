"""Rules of the repository."""

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import warnings

import pytest

from support.paths import ROOT, python_files

pytestmark = pytest.mark.style

SOURCES = python_files()
SHIPPED = [p for p in SOURCES if "src" in p.relative_to(ROOT).parts]
CORE = ROOT / "axlearn_core/src/axlearn_core"
FROZEN = ROOT / "benchmarks/baselines"
WATCHED = [p for p in SOURCES if not p.is_relative_to(FROZEN)]


def _functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _lines(function):
    """Return the lines of a function without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0
    return function.end_lineno - function.lineno + 1 - docstring


LONG_FILE = 600


@pytest.mark.filterwarnings("default:.*lines or more:UserWarning")
def test_long_files_are_named():
    """Warn about long files. This is not an error, because splitting one concern in two is worse."""
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in WATCHED}
    assert len(lines) > 500
    if long := {path: count for path, count in lines.items() if count >= LONG_FILE}:
        warnings.warn(f"files of {LONG_FILE} lines or more: {long}", stacklevel=1)


def test_no_function_grows_long():
    lines = {
        f"{p.relative_to(ROOT)}:{f.lineno} {f.name}": _lines(f)
        for p in WATCHED
        for f in _functions(ast.parse(p.read_text()))
    }
    assert len(lines) > 3000
    assert {name: count for name, count in lines.items() if count > 60} == {}


LAYERS = {
    "compat": set(),
    "errors": set(),
    "config": {"errors"},
    "contracts": {"config", "errors"},
    "plugins": {"compat", "config", "contracts", "errors"},
    "kernels": {"contracts", "errors", "plugins"},
    "nn": {"config", "errors", "kernels"},
    "compose": {"compat", "config", "contracts", "errors", "kernels", "nn", "plugins"},
    "learn": {"compose", "config", "contracts", "errors", "kernels", "nn"},
    "checkpoint": {"compat", "config", "contracts", "errors", "learn", "plugins"},
    "run": {"checkpoint", "compat", "compose", "config", "contracts", "errors", "learn", "plugins"},
    "train": {"checkpoint", "compat", "compose", "config", "contracts", "errors", "learn", "nn", "plugins", "run"},
    "cli": {"compat", "config", "contracts", "errors", "plugins", "run", "train"},
}
"""Imports of each layer of the core, including types. import-linter checks the order. This test makes every addition
explicit."""


def _imports(path):
    """Return the module and name of each import from this repository in a file, including imports in functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("axlearn_"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("axlearn_"))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_is_written_here(layer):
    files = [CORE / f"{layer}.py"] if (CORE / f"{layer}.py").exists() else [*(CORE / layer).rglob("*.py")]
    modules = {m if m != "axlearn_core" else f"{m}.{n}" for p in files for m, n in _imports(p)}
    layers = {m.split(".")[1] for m in modules if m.startswith("axlearn_core.")}
    assert layers - {layer} == LAYERS[layer]
    assert {m for m in modules if not m.startswith("axlearn_core")} == set(), "the core knows no plugin"


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[parts.index("src") + 1 :])
    return name.removesuffix(".__init__")


def _module_level_imports(body):
    """Return the imports that run when a module is imported, including those for type checking."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _module_level_imports(ast.iter_child_nodes(node))


def _import_graph(sources):
    """Return the imports of each module among these modules, given their sources by name."""
    graph = {}
    for module, text in sources.items():
        imported = set()
        for node in _module_level_imports(ast.parse(text).body):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            else:
                full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {name if name in sources else node.module for name in full.values()}
        graph[module] = (imported & sources.keys()) - {module}
    return graph


def _cycles(graph):
    """Return the part of a graph that remains after repeatedly removing nodes without imports or importers."""
    graph = {module: set(imported) for module, imported in graph.items()}
    while True:
        used = set().union(*graph.values()) if graph else set()
        reduced = {m: i & graph.keys() for m, i in graph.items() if i & graph.keys() and m in used}
        if reduced == graph:
            return reduced
        graph = reduced


def test_a_cycle_is_found():
    sources = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import B",
        "b": "import c",
        "c": "from a import A",
        "d": "import a\ndef late():\n    import e",
        "e": "import d",
    }
    assert _cycles(_import_graph(sources)).keys() == {"a", "b", "c"}


def test_no_module_imports_itself_by_way_of_others():
    graph = _import_graph({_module(p): p.read_text() for p in SHIPPED if "examples" not in p.parts})
    assert len(graph) > 300
    assert sum(map(len, graph.values())) > 1000
    assert _cycles(graph) == {}


def _annotations(function):
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    annotated = [a.annotation for a in every if a is not None and a.annotation is not None]
    return [*annotated, *([function.returns] if function.returns is not None else [])]


def test_the_signatures_of_the_core_say_what_they_take():
    functions = [f for p in CORE.rglob("*.py") for f in _functions(ast.parse(p.read_text()))]
    annotations = [a for f in functions for a in _annotations(f)]
    assert len(annotations) > 2000
    bare = [a for a in annotations if isinstance(a, ast.Name) and a.id == "Any"]
    assert len(bare) < 0.1 * len(annotations), f"{len(bare)} of {len(annotations)} are Any"


def test_only_compose_compiles():
    """Check that only `compose` compiles. Elsewhere, models would ignore the mesh, the rules and the kernel selection."""
    compilers = {"jit", "pjit", "pmap", "lower"}
    elsewhere = []
    for path in SHIPPED:
        if {"compose", "testing", "axlearn_testing"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "name", None)
            if name not in compilers or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            if name != "lower" or not _is_of_text(node, path):
                elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert elsewhere == []


def _is_of_text(node, path):
    """Return whether `x.lower` is a string method and not a request to a program.

    Only calls of programs have no arguments or a name.
    """
    line = path.read_text().splitlines()[node.lineno - 1]
    return ".lower()" in line or "program.lower(" in line


PRIVATE = re.compile(r"\b(jax|qwix|tokamax|flax|optax|orbax)\._src\b|\bjaxlib\._jax\b|^unittest(\.mock)?$")
"""Private modules of libraries, and tools that only tests may use to replace things."""


def gaps(source):
    """Return the line and description of each use of a private module and each change of the environment."""
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
    yield from _patches(tree)


def _patches(tree):
    """Return the line and description of each change to an imported module or class, or to the class of an object."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed = {ast.unparse(t) for t in targets if isinstance(t, ast.Attribute)} - {"sys.argv"}
            yield from ((node.lineno, t) for t in changed if t.split(".")[0] in names or t.endswith(".__class__"))
        elif isinstance(node, ast.Call):
            function, first = ast.unparse(node.func), ast.unparse(node.args[0]).split(".")[0] if node.args else ""
            if function in ("override_attribute", "compat.override_attribute") or (
                function == "setattr" and first in names
            ):
                yield node.lineno, function


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
        "import jax\njax.jit = None",
        "from jax.experimental.mosaic.gpu import core\ncore._infer_arch = None",
        "import jax\nsetattr(jax.numpy, 'dot', None)",
        "from axlearn_core import compat\nwith compat.override_attribute(module, 'name', 1): pass",
        "from axlearn_core.compat import override_attribute\nstack.enter_context(override_attribute(module, 'name', 1))",
        "layer.__class__ = type('Other', (Layer,), {})",
    ],
)
def test_what_libraries_do_not_give_is_found(planted):
    assert list(gaps(planted))


def test_public_names_of_libraries_are_not_reported():
    source = """
        'From `jax._src` in a docstring.'
        import os
        from jax.experimental import topologies
        environment = os.environ | {"A": "1"}
        value = os.environ["A"], os.environ.get("B")
        self.replaced, layer.weight = layers.replaced(variables), type(value).__class__
        setattr(self, "weight", value)
    """
    assert not list(gaps(textwrap.dedent(source)))


def test_private_apis_are_used_in_one_module_per_distribution():
    elsewhere = []
    for path in SHIPPED:
        if path.name != "compat.py" and "testing" not in path.parts:
            elsewhere += [f"{path.relative_to(ROOT)}:{line} {gap}" for line, gap in gaps(path.read_text())]
    assert elsewhere == []


def test_importing_the_plugins_changes_no_environment():
    code = (
        "import contextlib, os\nimport jax  # sets variables itself\nbefore = dict(os.environ)\n"
        "from axlearn_core.errors import PluginError\n"
        "from axlearn_core.plugins.manager import host\nfrom axlearn_core.plugins.registry import registry\n"
        "host()\n"
        "for kind in ('features', 'components', 'experiments', 'commands'):\n"
        "    for entry in registry().entries(kind):\n"
        "        with contextlib.suppress(PluginError):  # of a package that is not installed\n            entry.load()\n"
        "changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}\n"
        "print(sorted(changed))"
    )
    hidden = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_run_tells_the_libraries_of_hardware_that_is_not_here():
    variables = ("TPU_WORKER_HOSTNAMES", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    code = (
        "import os, pathlib\nfrom axlearn_plugins_tpu.hooks import has_local_tpu\n"
        "from axlearn_core.compose.devices import configure_devices\nconfigure_devices(None)\n"
        f"print([n for n in {variables} if n in os.environ] == "
        "[n for n, here in (('TPU_WORKER_HOSTNAMES', has_local_tpu()), "
        "('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', pathlib.Path('/dev/nvidiactl').exists())) if not here])"
    )
    env = {k: v for k, v in os.environ.items() if k not in (*variables, "TPU_ACCELERATOR_TYPE", "JAX_PLATFORMS")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout == "True\n"


def projects():
    """Return the `[project]` table of each distribution by name."""
    files = [f for folder in ("", "plugins") for f in (ROOT / folder).glob("*/pyproject.toml")]
    tables = [tomllib.loads(f.read_text())["project"] for f in files]
    return {project["name"]: project for project in tables}


def names(requirements):
    return {re.split(r"[<>=\[ ;]", r)[0] for r in requirements}


def test_all_is_all():
    tables = projects()
    every = names(tables["axlearn-core"]["optional-dependencies"]["all"])
    assert every == set(tables) - {"axlearn-core", "axlearn-index", "axlearn-testing"}
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert workspace["dependencies"] == ["axlearn-core[all]"]  # a clone has the same content as an installation


@pytest.mark.parametrize("backend", ["gpu", "neuron", "tpu"])
def test_a_backend_requires_what_its_mesh_rules_name(backend):
    tables = projects()
    rules = importlib.import_module(f"axlearn_plugins_{backend}.rules")
    required = names(tables[f"axlearn-plugins-{backend}"]["dependencies"])
    assert {"axlearn-plugins-models", "axlearn-plugins-plan", *rules.PACKAGES.values()} <= required


def test_every_distribution_has_its_license_and_readme():
    for project in [p.parent for folder in ("", "plugins") for p in (ROOT / folder).glob("*/pyproject.toml")]:
        assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text(), project
        assert len((project / "README.md").read_text().splitlines()) > 3, project
