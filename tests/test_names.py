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
