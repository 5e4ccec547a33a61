"""A plugin that uses a hook or a name of an earlier version: the error says what replaces it."""

import importlib
import json

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import PluginError
from axlearn_core.plugins import hookspecs
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.removed_names import HOOKS, NAMES, find_replacement

HOOK = """
from axlearn_core.plugins.hookspecs import hookimpl

{marker}
def axlearn_command_options(command):
    return []
"""
INSTEAD = "entry-point group `axlearn.options`"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_the_table_is_gone(name):
    """Else a plugin would be told to leave what it may use."""
    with pytest.raises((ImportError, AttributeError)) as caught:
        load_name(name)
    assert find_replacement(caught.value) == (name, NAMES[name])


def load_name(name):
    """A module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    parent = importlib.import_module(module)
    return importlib.import_module(name) if hasattr(parent, "__path__") else getattr(parent, attribute)


def test_no_removed_hook_exists():
    assert not set(HOOKS) & set(vars(hookspecs))


def test_a_module_with_a_removed_hook(install):
    modules = {"old_hooks": HOOK.format(marker="@hookimpl")}
    install("axlearn-plugins-old", "0.7", modules=modules, points={"plugins": {"old": "old_hooks"}})
    with pytest.raises(PluginError) as caught:
        host()
    assert "axlearn-plugins-old 0.7 implements the hook 'axlearn_command_options', which was removed" in str(
        caught.value
    )
    assert INSTEAD in str(caught.value)
    assert "AXLEARN_PLUGINS=-axlearn-plugins-old" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "removed"),
    [
        ("import axlearn_core.cli.open_command", "axlearn_core.cli.open_command"),
        ("from axlearn_core.cli.open_command import OpenCommand", "axlearn_core.cli.open_command"),
        ("from axlearn_core.cli import open_command", "axlearn_core.cli.open_command"),
        ("import axlearn_core.cli as c; c.open_command", "axlearn_core.cli.open_command"),
        ("import axlearn_core.testing.options", "axlearn_core.testing"),
    ],
)
def test_a_module_with_a_removed_name(install, source, removed):
    points = {"components": {"old": "old_part:Part"}}
    install("axlearn-plugins-old", "0.7", modules={"old_part": source}, points=points)
    with pytest.raises(PluginError) as caught:
        registry().component("old")
    assert f"removed: {removed}\n    instead: {NAMES[removed]}\n    fix: " in str(caught.value)


def test_another_error_of_an_import_names_nothing_removed(install):
    modules = {"old_part": "import axlearn_core.no_such_module"}
    install("axlearn-plugins-old", "0.7", modules=modules, points={"components": {"old": "old_part:Part"}})
    with pytest.raises(PluginError) as caught:
        registry().component("old")
    assert "removed" not in str(caught.value)
    assert find_replacement(ValueError("x")) is None
    assert find_replacement(AttributeError("x")) is None


@pytest.mark.fast_cases("")
@pytest.mark.parametrize("marker", ["@hookimpl", ""])
def test_the_doctor_says_what_replaces_a_removed_hook(install, monkeypatch, marker):
    installed = {"axlearn-core", "axlearn-plugins-tools"}
    others = {e.distribution for claims in registry().claims.values() for es in claims.values() for e in es}
    monkeypatch.setenv("AXLEARN_PLUGINS", ",".join(f"-{name}" for name in sorted(others - installed)))
    modules = {"old_hooks": HOOK.format(marker=marker)}
    install("axlearn-plugins-old", "0.7", modules=modules, points={"plugins": {"old": "old_hooks"}})
    result = CliRunner().invoke(cli, ["plugins", "doctor", "--json"])
    assert result.exit_code == 1, result.output
    findings = [f for f in json.loads(result.stdout) if f["name"] == "old" and f["status"] == "error"]
    assert len(findings) == 1
    assert "axlearn_command_options" in findings[0]["message"]
    assert INSTEAD in findings[0]["message"]
