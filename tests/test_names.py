"""Names describe values and actions."""

import ast
from pathlib import Path

import pytest

from support.paths import ROOT, python_files

pytestmark = pytest.mark.style

SOURCES = python_files()

VAGUE = {
    *("found", "made", "told", "mine", "there", "given", "done", "kept", "wanted", "seen", "known", "held"),
    *("settle", "here", "absent", "united", "say"),
}
"""Vague names. Use a noun for a value, and a verb for a function."""


def vague_names(source):
    """Return the line and name of each vague variable, parameter or function.

    `carry` is only vague for functions, because scans have a carry.
    """
    tree = ast.parse(source)
    bodies = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    # Fields may have these names, such as figures of a plan or displayed parts of a request.
    fields = {id(s.target) for s in bodies if isinstance(s, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            name, vague = node.id, VAGUE
        elif isinstance(node, ast.arg):
            name, vague = node.arg, VAGUE
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, vague = node.name, VAGUE | {"carry"}
        else:
            continue
        if name.strip("_") in vague:
            yield node.lineno, name


@pytest.mark.parametrize(
    "planted",
    [
        "found = 1",
        "def f(given): ...",
        "def settle(): ...",
        "def _made(): ...",
        "def carry(): ...",
        "[0 for told in x]",
    ],
)
def test_vague_names_are_found(planted):
    assert list(vague_names(planted))


def test_plain_names_are_not_vague():
    assert not list(vague_names("steps = x.found\ndef body(carry, x): return carry\nf(given=1)"))


def test_names_say_what_they_hold():
    vague = []
    for path in SOURCES:
        if "baselines" not in path.parts:
            vague += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in vague_names(path.read_text())]
    assert vague == []


CONVENTIONS = {
    "__init__": "a package",
    "command": "the command of a plugin",
    "compat": "what a distribution uses of other libraries' internals",
    "experiments": "the experiments of a family of models",
    "feature": "the feature of a plugin",
    "functions": "functions that a plugin registers",
    "hooks": "the hooks of a plugin",
    "huggingface": "the names of a family in Hugging Face files",
    "migrations": "the migrations of a plugin",
    "rules": "the mesh rules of a backend",
    "topology": "the absent devices of a backend",
    "weights": "what opens one kind of weights",
}
"""Module names that mean the same in every package."""

NAMED_AFTER = {
    "cli": "a command",
    "contracts": "the part that keeps the contract",
    "features": "a feature",
    "kernels": "an op, for which every backend may have kernels",
    "properties": "the part whose property it checks",
    "axlearn_testing": "the part that a suite tests",
    "testing": "the part that a suite of a plugin tests",
}
"""Folders whose modules are named after something else, and its description."""

SHARED = {
    *("objective", "state"),
    *("collectives", "files", "flops", "held", "render", "run", "sizes", "stream"),
}
"""Names that two modules still share. Rename one of them instead of adding to this list."""


def shared_names(modules):
    """Return the names of modules that mean different things in different packages."""
    places = {}
    for module in modules:
        *folders, name = module.split(".")
        if name not in CONVENTIONS and not NAMED_AFTER.keys() & set(folders):
            places.setdefault(name, []).append(module)
    return {name: same for name, same in places.items() if len(same) > 1}


def _modules():
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "src" in parts and "examples" not in parts:
            yield ".".join(parts[parts.index("src") + 1 :])


def test_a_shared_name_is_found():
    planted = ["core.train.peers", "runtime.peers", "core.cli.peers", "a.hooks", "b.hooks", "gpu.kernels.x", "moe.x"]
    assert shared_names(planted) == {"peers": ["core.train.peers", "runtime.peers"]}


def test_modules_of_two_packages_share_no_name():
    shared = shared_names(_modules())
    assert {name: modules for name, modules in shared.items() if name not in SHARED} == {}


def underscored(paths):
    """Return modules and folders that only differ from a neighbor by a trailing underscore."""
    names = {path.with_suffix("") for path in paths} | {path.parent for path in paths}
    return {str(name) for name in names if name.with_name(name.name.rstrip("_")) in names - {name}}


def test_no_module_differs_by_an_underscore():
    assert underscored([Path("b/x.py"), Path("b/x_/y.py"), Path("b/z_.py")]) == {"b/x_"}
    assert underscored([path.relative_to(ROOT) for path in SOURCES]) == set()


def _classes():
    """Return the name, bases and location of each class."""
    for path in SOURCES:
        if "src" in path.parts and "examples" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                    yield node.name, bases, f"{path.relative_to(ROOT)}:{node.lineno}"


def misnamed_ops(classes):
    """Return ops without the ending `Op`, and other classes that share the name of an op without the ending."""
    classes = list(classes)
    ops = {"Op"}
    while more := {name for name, bases, _ in classes if ops & set(bases)} - ops:
        ops |= more
    return [place for name, _, place in classes if name in ops and not name.endswith("Op")]


def test_an_op_is_told_from_its_layer():
    planted = [("Attention", ["Op"], "a"), ("InvariantOp", ["Attention"], "b"), ("Attention", ["Layer"], "c")]
    assert misnamed_ops(planted) == ["a", "c"]
    classes = list(_classes())
    assert sum(name.endswith("Op") for name, _, _ in classes) > 6
    assert misnamed_ops(classes) == []


LONGEST = 69
"""Characters of the longest name of a test."""


def long_tests(source):
    """Return the names of test functions that are too long to read at a glance."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions if f.name.startswith("test_") and len(f.name) > LONGEST]


def test_names_of_tests_are_short():
    short, long = "test_" + "x" * (LONGEST - 5), "test_" + "x" * (LONGEST - 4)
    assert long_tests(f"class A:\n    def {short}(): ...\n    async def {long}(): ...") == [long]
    assert {str(p.relative_to(ROOT)): names for p in SOURCES if (names := long_tests(p.read_text()))} == {}
