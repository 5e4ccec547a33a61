"""The metadata of each distribution agrees with its code: requirements, sources, folders."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from support.paths import ROOT

PROJECTS = sorted([*ROOT.glob("axlearn_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
OWN = {tomllib.loads(path.read_text("utf-8"))["project"]["name"] for path in PROJECTS}


def project_of(path):
    return tomllib.loads(path.read_text("utf-8"))


def distribution_of(module):
    """Return the distribution that contains a module, or None if it is not ours."""
    name = module.split(".")[0].replace("_", "-")
    return name if name in OWN else None


def imports(tree):
    """Return each imported module, and whether importing the file imports it.

    Ignores imports under `if TYPE_CHECKING`.
    """

    def visit(nodes, eager):
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from visit(node.orelse, eager)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module, eager
            elif isinstance(node, ast.Import):
                yield from ((alias.name, eager) for alias in node.names)
            else:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                guarded = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h) for h in node.handlers)
                yield from visit(ast.iter_child_nodes(node), eager and not is_function and not guarded)

    return visit(tree.body, True)


def test_imports_are_told_apart():
    source = (
        "import a\ntry:\n    import b\nexcept ImportError:\n    pass\ntry:\n    import c\nfinally:\n    pass\n"
        "if TYPE_CHECKING:\n    import d\nelse:\n    import e\ndef f():\n    from g import h\nclass I:\n    import j\n"
    )
    assert dict(imports(ast.parse(source))) == {"a": True, "b": False, "c": True, "e": True, "g": False, "j": True}


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements):
    return {normalized(re.match(r"[A-Za-z0-9_.-]+", requirement)[0]) for requirement in requirements}


read_providers = functools.cache(packages_distributions)  # reads every file list, so not while tests are collected


def distributions_of(module):
    """Return the distributions that may provide a module. Return an empty set for the standard library."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return set()
    return {name} if (name := distribution_of(module)) else {normalized(n) for n in read_providers().get(top, [top])}


EXTRAS = {
    ("axlearn-plugins-models", "prove_export.py"): "axlearn-plugins-verify",
    ("axlearn-plugins-rl", "testing"): "axlearn-testing",
    ("axlearn-plugins-serving", "plan"): "axlearn-plugins-plan",
    ("axlearn-plugins-serving", "prove_paged.py"): "axlearn-plugins-verify",
    ("axlearn-plugins-serving", "testing"): "axlearn-testing",
    ("axlearn-plugins-transformer", "testing"): "axlearn-testing",
    ("axlearn-plugins-tools", "harness.py"): "lm-eval",
    ("axlearn-plugins-verify", "testing"): "axlearn-testing",
}
"""Extra that a folder or file of a distribution may import at module level."""
BROUGHT = {"axlearn-testing": {"pytest"}}
"""Packages that an extra installs."""


@pytest.mark.slow_cases("axlearn_core", "runtime", "serving", "transformer")
@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_is_imported_is_required(path):
    """Check that imported modules belong to requirements.

    Modules that are imported with a distribution must belong to its requirements or the core's. Other modules may belong to
    an extra.
    """
    project = project_of(path)["project"]
    core = names_of(project_of(ROOT / "axlearn_core/pyproject.toml")["project"]["dependencies"])
    required = names_of(project["dependencies"]) | core | {project["name"]}
    extras = names_of(r for extra in project.get("optional-dependencies", {}).values() for r in extra)
    missing = {}
    for file in path.parent.glob("src/axlearn_*/**/*.py"):
        optional = {extra for (name, part), extra in EXTRAS.items() if name == project["name"] and part in file.parts}
        assert optional <= extras
        allowed = required.union(optional, *(BROUGHT.get(extra, ()) for extra in optional))
        for module, eager in imports(ast.parse(file.read_text("utf-8"))):
            providers = distributions_of(module)
            if providers and not providers & (allowed if eager else allowed | extras):
                missing.setdefault(module.split(".")[0], []).append(str(file.relative_to(ROOT)))
    assert not missing, f"{project['name']} imports what it does not require"


NOT_IMPORTED = {
    "axlearn-core": {"orbax-checkpoint"},
    "axlearn-plugins-gpu": {"jax-cuda12-plugin", "nvidia-cuda-runtime-cu12"},  # JAX loads them
    "axlearn-plugins-serving": {
        "h11",
        "tokenizers",
    },  # uvicorn imports the first; the second raises the version of transformers
}
"""Requirements that no module imports. Other tests check requirements among our distributions that are for names in configs."""
JOB = "axlearn-plugins-runtime"
FOR_ENTRY_POINTS = {
    **{
        f"axlearn-plugins-{name}": {JOB} for name in ("cpu", "gpu", "neuron", "tpu")
    },  # every installation needs to lock its runs
    "axlearn-testing": {JOB},  # the suite for loops stops them with a signal
}
"""Requirements for their entry points. Modules do not need to import them."""


@pytest.mark.slow_cases("axlearn_core", "runtime", "serving", "transformer")
@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_is_required_is_imported(path):
    project = project_of(path)["project"]
    files = path.parent.glob("src/axlearn_*/**/*.py")
    modules = {module for file in files for module, _ in imports(ast.parse(file.read_text("utf-8")))}
    imported = set().union(*map(distributions_of, modules))
    unused = names_of(project["dependencies"]) - imported - OWN - {"axlearn-core"}
    assert unused <= NOT_IMPORTED.get(project["name"], set())
    assert FOR_ENTRY_POINTS.get(project["name"], set()) <= names_of(project["dependencies"]) - imported


def test_every_accelerator_brings_the_parts_of_jobs():
    accelerators = {project_of(path)["project"]["name"] for path in ROOT.glob("axlearn_plugins_*/pyproject.toml")}
    assert {name for name, needs in FOR_ENTRY_POINTS.items() if JOB in needs} == accelerators | {"axlearn-testing"}


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_requirements_of_the_project_come_from_the_workspace(path):
    """Check that each distribution declares its sources, so that the root does not need a line for a new distribution."""
    content = project_of(path)
    project = content["project"]
    extras = project.get("optional-dependencies", {}).values()
    everything = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    needed = names_of(everything) & OWN
    sources = content.get("tool", {}).get("uv", {}).get("sources", {})
    assert set(sources) == needed
    assert all(source == {"workspace": True} for source in sources.values())


def test_requirements_have_no_cycle():
    """Check the requirements among plugins. The core's extra `all` does not count as a requirement."""
    graph = {p["name"]: names_of(p["dependencies"]) & OWN for p in (project_of(x)["project"] for x in PROJECTS)}
    ended = set()
    while free := {name for name, needs in graph.items() if name not in ended and needs <= ended}:
        ended |= free
    assert ended == OWN, f"these require one another: {sorted(OWN - ended)}"


def test_the_root_finds_distributions_by_folder():
    workspace = project_of(ROOT / "pyproject.toml")["tool"]["uv"]["workspace"]["members"]
    folders = {folder for pattern in workspace for folder in ROOT.glob(pattern) if (folder / "pyproject.toml").exists()}
    assert folders == {path.parent for path in PROJECTS}
