"""The index of which package brings a name, and the errors where that package is not installed."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.plugins.index import FILE, not_installed, package_of
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import GROUPS
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_cloud.hooks import FSSPEC

ROOT = Path(__file__).resolve().parents[3]


def registered():
    """Group -> name -> distribution: what the packages of this repository register."""
    projects = [ROOT / "axlearn_core", *ROOT.glob("axlearn_plugins_*"), *ROOT.glob("plugins/*")]
    names = {group: {} for group in GROUPS if group != "plugins"} | {"targets": {}, "storages": {}}
    own = set()
    for folder in projects:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        own.add(project["name"])
        for group, points in project.get("entry-points", {}).items():
            if (word := group.removeprefix("axlearn.")) in names:
                names[word] |= dict.fromkeys(points, project["name"])
    for origin, targets in host().answers("axlearn_targets"):
        package = origin.split()[-2]  # "gpu of axlearn-plugins-gpu 0.1.0"
        names["targets"] |= {t.name: package for t in targets if package in own}
    names["storages"] = dict.fromkeys(("s3", "gs", *FSSPEC), "axlearn-plugins-cloud")
    return {group: dict(sorted(names[group].items())) for group in sorted(names)}


def test_the_index_is_what_is_registered(pytestconfig):
    text = json.dumps(registered(), indent=1) + "\n"
    if pytestconfig.getoption("--update-goldens"):
        FILE.write_text(text, "utf-8")
    assert FILE.read_text("utf-8") == text, "pytest tests/core/plugins/test_index.py --update-goldens"


@pytest.mark.parametrize(
    ("group", "name", "package"),
    [
        ("features", "rope", "axlearn-plugins-rope"),
        ("experiments", "llama2-7b", "axlearn-plugins-models"),
        ("commands", "plan", "axlearn-plugins-plan"),
        ("targets", "tpu-v5p-512", "axlearn-plugins-tpu"),
        ("targets", "h100-8x4", "axlearn-plugins-gpu"),
        ("targets", "tpu-v5p512", None),
        ("features", "rop", None),
        ("features", "plan", None),
    ],
)
def test_a_name_has_a_package(group, name, package):
    assert package_of(group, name) == package
    error = not_installed(group, name)
    assert (error is None) == (package is None)
    assert error is None or f"pip install {package}" in str(error)


def without(monkeypatch, *packages):
    """The process as it is where some packages were never installed."""
    import importlib_metadata

    every = importlib_metadata.entry_points

    def entry_points(**params):
        points = every(**params)
        return type(points)(p for p in points if p.dist is None or p.dist.name not in packages)

    monkeypatch.setattr(importlib_metadata, "entry_points", entry_points)
    monkeypatch.syspath_prepend(f"/nowhere/{packages}")  # what is installed is read again


def command(*words):
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_commands_that_are_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-plan", "axlearn-plugins-models")
    assert "'plan' is not installed: axlearn-plugins-plan brings it (pip install" in command("plan", "quickstart")
    assert "'import-hf' is not installed: axlearn-plugins-models brings it" in command("checkpoint", "import-hf")
    assert "Did you mean: train" in command("trian", "quickstart")
    assert "Did you mean: list" in command("checkpoint", "lits")


@pytest.mark.parametrize(
    "words", [("serve", "quickstart"), ("quickstart", "--serve"), ("quickstart", "--export", "x", "--serve")]
)
def test_a_subcommand_that_is_not_installed(monkeypatch, words):
    without(monkeypatch, "axlearn-plugins-serving")
    error = (
        "`axlearn plan serve` is not installed: axlearn-plugins-serving brings it (pip install axlearn-plugins-serving)"
    )
    assert error in command("plan", *words)
    assert "serve" not in CliRunner().invoke(cli, ["plan", "--help"]).stdout.partition("Commands:")[2]


def test_a_subcommand_whose_command_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-plan")
    assert "'plan' is not installed: axlearn-plugins-plan brings it" in command("plan", "serve", "quickstart")
    listed = CliRunner().invoke(cli, ["--help"]).stdout
    assert "plan-serve" not in listed
    assert "serve " in listed


def test_an_option_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-runtime")
    error = "--shadow is not installed: axlearn-plugins-runtime brings it (pip install axlearn-plugins-runtime)"
    assert error in command("train", "quickstart", "--shadow", "remat")


def test_features_experiments_and_targets_that_are_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-rope", "axlearn-plugins-models", "axlearn-plugins-gpu")
    assert "the feature 'rope' is not installed: axlearn-plugins-rope" in command("features", "show", "rope")
    assert "the experiment 'vit-tiny' is not installed: axlearn-plugins-models" in command("config", "show", "vit-tiny")
    with pytest.raises(RequestError, match="the target 'h100-8x4' is not installed: axlearn-plugins-gpu brings it"):
        find_machine("h100-8x4")


def test_a_function_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-serving")
    with pytest.raises(RequestError, match="the function 'serve' is not installed: axlearn-plugins-serving brings it"):
        _ = ax.serve


def test_a_storage_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-cloud")
    with pytest.raises(RequestError, match="axlearn-plugins-cloud has s3://"):
        open_storage("s3://bucket/run")
