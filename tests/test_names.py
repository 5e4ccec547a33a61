"""Names say what they hold or do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]

VAGUE = {
    *("found", "made", "told", "mine", "there", "given", "done", "kept", "wanted", "seen", "known", "held"),
    *("settle", "here", "absent", "united", "say"),
}
"""Names that say nothing of what they hold or do. A noun for the value, a verb for the function."""


def vague_names(source):
    """(line, name) of each variable, parameter and function with such a name. `carry` is one of functions: scans have one."""
    tree = ast.parse(source)
    bodies = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    fields = {
        id(s.target) for s in bodies if isinstance(s, ast.AnnAssign)
    }  # figures of a plan, what is shown of a request, ...
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
"""Modules that do the same in every package that has one."""

NAMED_AFTER = {
    "cli": "a command",
    "contracts": "the part that keeps the contract",
    "features": "a feature",
    "kernels": "an op, for which every backend may have kernels",
    "axlearn_testing": "the part that a suite tests",
    "testing": "the part that a suite of a plugin tests",
}
"""Folders whose modules have the name of something else, and what that is."""

SHARED = {
    *("objective", "state"),
    *("collectives", "files", "flops", "held", "render", "run", "sizes", "stream"),
}
"""Names that two modules still share. Rename one of them rather than add to this."""


def shared_names(modules):
    """Name -> the modules of different packages that have it, though they do different things."""
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
    """Modules and folders that differ from one beside them by a trailing underscore only."""
    names = {path.with_suffix("") for path in paths} | {path.parent for path in paths}
    return {str(name) for name in names if name.with_name(name.name.rstrip("_")) in names - {name}}


def test_no_module_differs_by_an_underscore():
    assert underscored([Path("b/x.py"), Path("b/x_/y.py"), Path("b/z_.py")]) == {"b/x_"}
    assert underscored([path.relative_to(ROOT) for path in SOURCES]) == set()


def _classes():
    """(name, bases, place) of each class of the distributions."""
    for path in SOURCES:
        if "src" in path.parts and "examples" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                    yield node.name, bases, f"{path.relative_to(ROOT)}:{node.lineno}"


def misnamed_ops(classes):
    """Places of ops that lack the ending `Op`, and of other classes that have the name of an op without it."""
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
