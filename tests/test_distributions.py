"""What each distribution says of itself agrees with its code: requirements, sources, folders."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = sorted([*ROOT.glob("axlearn_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
OWN = {tomllib.loads(path.read_text("utf-8"))["project"]["name"] for path in PROJECTS}


def project_of(path):
    return tomllib.loads(path.read_text("utf-8"))


def distribution_of(module):
    """The distribution that has a module; None where that is somebody else's."""
    name = module.split(".")[0].replace("_", "-")
    return name if name in OWN else None


def eager_imports(tree):
    """Modules that importing the file imports: not those of functions, nor of `if TYPE_CHECKING`."""
    for node in tree.body:
        blocks = [node]
        if isinstance(node, ast.Try):
            blocks = [*node.body, *node.orelse, *node.finalbody]
        for statement in blocks:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                yield statement.module
            elif isinstance(statement, ast.Import):
                yield from (alias.name for alias in statement.names)


def names_of(requirements):
    return {re.match(r"[A-Za-z0-9_-]+", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_is_imported_is_required(path):
    project = project_of(path)["project"]
    required = names_of(project["dependencies"]) | {project["name"]}
    # A module that only another distribution loads (by its entry point or its command) may need that one.
    plan = {"axlearn-plugins-serving": {"plan": "axlearn-plugins-plan"}}.get(project["name"], {})
    optional = {"testing": "axlearn-testing", **plan}
    missing = {}
    for file in path.parent.glob("src/axlearn_*/**/*.py"):
        allowed = required | {optional[part] for part in file.parts if part in optional}
        for module in eager_imports(ast.parse(file.read_text("utf-8"))):
            name = distribution_of(module)
            if name and name not in allowed:
                missing.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert not missing, f"{project['name']} imports what it does not require"


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_requirements_of_the_project_come_from_the_workspace(path):
    """Each names its sources itself, so that a new distribution needs no line in the root."""
    content = project_of(path)
    project = content["project"]
    extras = project.get("optional-dependencies", {}).values()
    everything = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    needed = names_of(everything) & OWN
    sources = content.get("tool", {}).get("uv", {}).get("sources", {})
    assert set(sources) == needed
    assert all(source == {"workspace": True} for source in sources.values())


def test_requirements_have_no_cycle():
    """Among plugins; the core's extra `all` names them, which is not a requirement."""
    graph = {p["name"]: names_of(p["dependencies"]) & OWN for p in (project_of(x)["project"] for x in PROJECTS)}
    ended = set()
    while free := {name for name, needs in graph.items() if name not in ended and needs <= ended}:
        ended |= free
    assert ended == OWN, f"these require one another: {sorted(OWN - ended)}"


def test_the_root_finds_distributions_by_folder():
    workspace = project_of(ROOT / "pyproject.toml")["tool"]["uv"]["workspace"]["members"]
    folders = {folder for pattern in workspace for folder in ROOT.glob(pattern) if (folder / "pyproject.toml").exists()}
    assert folders == {path.parent for path in PROJECTS}
