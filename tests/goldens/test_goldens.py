"""What every experiment and feature comes to, kept as text; `pytest --update-goldens` writes it anew.

A change of one of these files is a change for users: it belongs into the commit that causes it, to be seen in review.
"""

import difflib
from pathlib import Path

import pytest

from axlearn_core.compose.functional import Functional
from axlearn_core.config import diff, flatten
from axlearn_core.errors import AxlearnError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve

HERE = Path(__file__).parent
EXPERIMENTS = [e.name for e in registry().entries("experiments")]
FEATURES = [e.name for e in registry().entries("features")]


def experiment(name: str) -> str:
    """The flat config, then the path, dtype, shape and axes of each parameter."""
    tree = registry().experiment(name)
    lines = [f"{path} = {value!r}" for path, value in flatten(tree, registry().display_name).items()]
    functional = Functional.from_config(tree.model)
    for path, array in sorted(functional.abstract.items()):
        axes = ", ".join(str(a) for a in functional.axes[path])
        lines.append(f"{path}: {array.dtype}[{', '.join(map(str, array.shape))}] ({axes})")
    return "\n".join(lines) + "\n"


def feature(name: str) -> str:
    """What it changes in the quickstart, with the options of its example."""
    tree, options = registry().experiment("quickstart"), registry().feature(name).example
    text = f"{name}:{options}" if options else name
    try:
        changes = diff(tree, resolve(tree, with_=[text]).config, registry().display_name)
    except AxlearnError as error:
        return f"quickstart --with {text} is refused:\n{error}\n"
    signs = {"added": "+", "removed": "-", "changed": "~"}
    lines = [f"quickstart --with {text}"]
    for c in changes:
        sides = {"added": f"{c.new!r}", "removed": f"{c.old!r}", "changed": f"{c.old!r} -> {c.new!r}"}[c.kind]
        lines.append(f"{signs[c.kind]} {c.path}: {sides}")
    return "\n".join(lines) + "\n"


def compare(file: Path, text: str, config: pytest.Config) -> None:
    """Against the file; or writes it."""
    if config.getoption("--update-goldens"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    old = file.read_text("utf-8").splitlines() if file.exists() else []
    changed = "\n".join(difflib.unified_diff(old, text.splitlines(), "kept", "now", lineterm="", n=1))
    assert not changed, (
        f"{file.name} is not what it was; if that is meant: pytest tests/goldens --update-goldens\n{changed}"
    )


@pytest.mark.fast_cases("llama2-7b", "llama3-8b", "mistral-7b", "quickstart", "vit-b16")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment(name, pytestconfig):
    compare(HERE / "experiments" / f"{name}.txt", experiment(name), pytestconfig)


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, pytestconfig):
    compare(HERE / "features" / f"{name}.txt", feature(name), pytestconfig)


@pytest.mark.parametrize(("kind", "names"), [("experiments", EXPERIMENTS), ("features", FEATURES)])
def test_nothing_is_kept_of_what_is_gone(kind, names, pytestconfig):
    gone = [p for p in (HERE / kind).glob("*") if p.stem not in names]
    if pytestconfig.getoption("--update-goldens"):
        for path in gone:
            path.unlink()
    assert not [p for p in gone if p.exists()]
