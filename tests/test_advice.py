"""Every package, extra, command and option in a message, docstring, help text or page exists."""

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from axlearn_core.cli.commands import related_commands
from axlearn_core.cli.extensible import ExtensibleCommand, load_command
from axlearn_core.cli.main import cli
from support.paths import ROOT

pytestmark = pytest.mark.style

PLACEHOLDER = "…"
"""Placeholder for a value in an f-string."""
THIRD_PARTY = {
    "datasets", "jax", "jax-cuda12-plugin", "jupyterlab", "matplotlib", "moto", "pip", "skypilot", "torch", "twine", "uv",
    "verifiers", "vllm",
}  # fmt: skip
"""Third-party packages that texts name, with any extras."""
EXAMPLES = {
    "axlearn-plugins-my-gate",
    "axlearn-plugins-my-norm",
    "axlearn-plugins-sandwich",
    "axlearn-plugins-foo",
    "axlearn-plugins-toy",
}
"""Packages that readers write, and placeholders."""


def _projects() -> dict[str, set[str]]:
    """Return the distributions of the workspace and the examples, with their extras."""
    files = [*ROOT.glob("axlearn_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    files += ROOT.glob("examples/*/pyproject.toml")
    projects = [tomllib.loads(file.read_text("utf-8"))["project"] for file in files]
    return {project["name"]: set(project.get("optional-dependencies", ())) for project in projects}


def _entry_points(file: Path, *groups: str) -> list[str]:
    points = tomllib.loads(file.read_text("utf-8"))["project"].get("entry-points", {})
    return [name for group in groups for name in points.get(f"axlearn.{group}", ())]


PROJECTS = _projects()
ADDED = {
    option
    for file in (ROOT / "examples").glob("*/pyproject.toml")
    for name in _entry_points(file, "commands", "options")
    for option in (f"--{name.partition('-')[2].lstrip('-')}",)
}
"""Options and commands that the example plugins add."""


def strings(source: str) -> Iterator[str]:
    """Return the strings in Python code, including docstrings."""
    tree = ast.parse(source)
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else PLACEHOLDER for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@functools.cache
def texts() -> dict[str, str]:
    """Return the path and text of each page, and the strings of each module.

    Excludes benchmark results, which record old commands.
    """
    result = {}
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if name.startswith(("tests/", "benchmarks/results/", "benchmarks/baselines/")):
            continue
        if name.endswith((".md", ".template", ".ipynb", ".toml", ".html", ".sh")):
            result[name] = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
        elif name.endswith(".py"):
            result[name] = "\n".join(strings((ROOT / name).read_text("utf-8"))).replace("\\\n", " ")
    return result


_OURS = re.compile(r"\baxlearn-(?:core|plugins(?:-[a-z0-9]+)+)(?:\[([\w,-]+)\])?(?!-?[A-Z…{*\w])")
_INSTALL = re.compile(r"\b(?:(?:pip install|uv add|uv tool install) ([^\n`|;)&#…]*)|uv run --with (\S+))")
_REQUIREMENT = re.compile(r"([A-Za-z][\w.-]*)(?:\[([\w,-]+)\])?")
_JOINING = {"and", "in", "or", "then", "with"}
_COMMAND = re.compile(r"(?<![\w/-])axlearn ((?:[a-z][a-z-]*|--[a-z])[^\n`|;)&#\"]*)")
_PROSE = re.compile(r"[a-z,] $")


def wrong_packages(text: str) -> list[str]:
    """Return the packages and extras in a text that do not exist."""
    wrong = []
    for match in _OURS.finditer(text):
        name, _, extras = match[0].partition("[")
        wrong += [f"{name}: no such distribution"] if name not in PROJECTS.keys() | EXAMPLES else []
        unknown = set(filter(None, extras.rstrip("]").split(","))) - PROJECTS.get(name, {"test"})
        wrong += [f"{name}[{extra}]: no such extra" for extra in sorted(unknown)]
    for match in _INSTALL.finditer(text):
        for word in installed(match[1] or match[2] or ""):
            if not word.startswith("axlearn-") and word.partition("[")[0] not in THIRD_PARTY:
                wrong.append(f"{word}: not a package that this test knows")
    return wrong


def installed(words: str) -> Iterator[str]:
    """Return the requirements after `pip install`, up to the rest of the sentence."""
    words = re.sub(r"\s(?:-e|--python)\s+\S+", " ", " " + words)
    for word in words.split():
        bare = word.strip("\"'\\,.(:")
        if word.startswith("-") and bare not in {"--with", "--upgrade", "--force-reinstall", "--no-cache-dir"}:
            return
        if _REQUIREMENT.fullmatch(bare):
            if bare in _JOINING:
                return
            yield bare
        if word.endswith((",", ".", ":")) or word.startswith("("):
            return


def wrong_commands(text: str) -> list[str]:
    """Return the `axlearn` commands and options in a text that do not exist."""
    wrong = []
    for match in _COMMAND.finditer(text):
        before = text[max(0, match.start() - 8) : match.start()]
        if _PROSE.search(before) and not before.endswith(("run ", "in ", "&& ")):
            continue
        words = match[1].split(" -- ")[0].split()
        command: click.Command = cli
        path = ["axlearn"]
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*[,.:]?", words[0]):
            path.append(words.pop(0).rstrip(",.:"))
            child = command.get_command(click.Context(command), path[-1])
            if child is None:
                wrong.append(f"{' '.join(path)}: no such command")
                break
            command = child
        else:
            options = {o for p in command.get_params(click.Context(command)) for o in (*p.opts, *p.secondary_opts)}
            if isinstance(command, ExtensibleCommand):  # its subcommands are flags and have separate options
                names = related_commands(command.entry_name)
                options |= {f"--{name.rpartition('-')[2]}" for name in names}
                options |= {o for name in names for p in load_command(name).params for o in p.opts}
            spellings = {w for word in words if (w := re.match(r"-{1,2}[a-z][a-z-]*", word.strip("[]()'\",.:")))}
            wrong += [
                f"{' '.join(path)} {w[0]}: no such option" for w in spellings if w[0] not in options | ADDED | {"-h"}
            ]
    return wrong


@pytest.mark.slow_cases("wrong_packages")
@pytest.mark.parametrize("check", [wrong_packages, wrong_commands])
def test_what_is_advised_exists(check):
    wrong = [f"{name}: {problem}" for name, text in texts().items() for problem in check(text)]
    assert not wrong, "\n".join(wrong)


def test_enough_is_looked_at():
    everything = "\n".join(texts().values())
    assert len(_OURS.findall(everything)) > 200
    assert len(_INSTALL.findall(everything)) > 60
    assert len(_COMMAND.findall(everything)) > 500


def test_what_does_not_exist_is_found():
    assert wrong_packages('    fix: pip install "axlearn-core[wandb]"') == ["axlearn-core[wandb]: no such extra"]
    assert wrong_packages("`pip install axlearn-plugins-tool`") == ["axlearn-plugins-tool: no such distribution"]
    assert wrong_packages("pip install wandbb") == ["wandbb: not a package that this test knows"]
    assert wrong_packages('pip install "axlearn-plugins-tools[wandb]"') == []
    assert wrong_commands("see `axlearn data` for more") == ["axlearn data: no such command"]
    assert wrong_commands("  axlearn lora mrge A B") == ["axlearn lora mrge: no such command"]
    assert wrong_commands("`axlearn plan quickstart --tagret cpu`") == ["axlearn plan --tagret: no such option"]
    assert wrong_commands("`uv run axlearn serve RUN --port 0 -- --any-of-vllm`") == []
