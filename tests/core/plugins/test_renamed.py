"""Functions, classes and components under their earlier names: the same objects, and a warning that says the new name."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from axlearn_core.plugins.migrations import migrate_config
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.renamed import COMPONENTS
from axlearn_core.plugins.resolve import resolve

ROOT = Path(__file__).resolve().parents[3]
FIXTURE = ROOT / "tests/fixtures/run_of_llama/run"


def declared():
    """(module, earlier name, name) of each call of `renamed_attributes`."""
    for path in sorted(ROOT.glob("**/src/**/*.py")):
        if "renamed_attributes(" not in (text := path.read_text("utf-8")) or path.name == "renamed.py":
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "renamed_attributes":
                yield from ((module, keyword.arg, keyword.value.value) for keyword in node.keywords)


DECLARED = list(declared())


def test_these_were_renamed():
    assert {old for _, old, _ in DECLARED} >= {
        "absent",
        "here",
        "settle",
        "united",
        "say",
        "carry",
        "OrbaxCheckpointer",
    }


@pytest.mark.parametrize(("name", "old", "new"), DECLARED)
def test_an_earlier_name_warns_and_gives_the_object(name, old, new):
    module = importlib.import_module(name)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}") as records:
        assert getattr(module, old) is getattr(module, new)
    assert [r.filename for r in records] == [__file__]  # it points at whoever uses the name
    with pytest.raises(AttributeError, match="no attribute 'never_was'"):
        _ = module.never_was


def test_an_earlier_module_of_the_checkpointer():
    code = (
        "from axlearn_core.checkpoint.orbax import ShardedCheckpointer as old\n"
        "from axlearn_core.checkpoint import ShardedCheckpointer as new\nassert old is new\n"
    )
    result = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert "axlearn_core.checkpoint.orbax moved to axlearn_core.checkpoint.sharded" in result.stderr


@pytest.mark.parametrize(("old", "new"), COMPONENTS.items())
def test_a_component_under_its_earlier_name(old, new):
    with pytest.warns(DeprecationWarning, match=f"the component '{old}' is now '{new}'"):
        cls = registry().component(old)
    assert cls is registry().component(new)
    assert registry().name_of(cls) == new


def test_a_file_with_an_earlier_name_gives_the_config_of_today(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("experiment: quickstart\nset:\n  checkpointer: {type: orbax, every_steps: 150, keep_last: 2}\n")
    with pytest.warns(DeprecationWarning, match="'orbax' is now 'sharded'"):
        assert resolve(path).config == resolve("quickstart").config


def test_the_config_of_a_run_with_an_earlier_name_is_read_without_a_warning():
    """Nobody can change it. Warnings are errors in these tests."""
    assert "type: orbax" in (FIXTURE / "config.yaml").read_text()
    assert registry().name_of(type(resolve(FIXTURE / "config.yaml").config.checkpointer)) == "sharded"


def test_only_types_are_renamed():
    config = {"name": "orbax", "type": "orbax", "parts": [{"type": "orbax"}, "orbax"], "map": {"orbax": {"type": 3}}}
    renamed = {
        "name": "orbax",
        "type": "sharded",
        "parts": [{"type": "sharded"}, "orbax"],
        "map": {"orbax": {"type": 3}},
    }
    assert migrate_config(config) == renamed
