"""The index of packages and names, and the errors for packages that are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import axlearn_core as ax
import axlearn_index
from axlearn_core.checkpoint import open_storage
from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.plugins.index import find_package, indexes, not_installed_error
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.targets import find_machine
from axlearn_index.build import collect_names, workspace_members, write_index
from axlearn_plugins_cloud.hooks import FSSPEC
from axlearn_plugins_tools.doctor.examine import examine_indexes
from support.paths import ROOT


@pytest.fixture(scope="module")
def names():
    return collect_names(workspace_members(ROOT))


def test_the_installed_index_is_that_of_the_workspace(names):
    file = Path(axlearn_index.__file__).with_name("index.json")
    assert json.loads(file.read_text("utf-8")) == names, "`uv sync --all-packages` makes it again"


def test_the_index_has_what_is_registered(names):
    """Compares the packages of this repository only, since examples may be installed too."""
    own = {package for group in names.values() for package in group.values()}
    for group, claims in registry().claims.items():
        if group != "plugins":
            registered = {n: e.distribution for n, entries in claims.items() for e in entries if e.distribution in own}
            assert registered == names.get(group, {})


def test_the_index_has_the_targets_and_schemes_of_hooks(names):
    answered = {}
    for origin, targets in host().call("axlearn_targets"):
        answered |= {t.name: origin.split()[-2] for t in targets}  # "gpu of axlearn-plugins-gpu 0.1.0"
    own = {package for group in names.values() for package in group.values()}
    assert {name: package for name, package in answered.items() if package in own} == names["targets"]
    assert set(names["storages"]) == {"s3", "gs", *FSSPEC}


def test_nothing_generated_is_kept_in_git():
    tracked = subprocess.run(["git", "ls-files", "axlearn_index"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "index.json" not in tracked


def write_project(folder, name, text):
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n{text}')
    return folder


def test_a_project_declares_names(tmp_path):
    one = write_project(
        tmp_path / "one",
        "one",
        '[project.entry-points."axlearn.features"]\nmore = "one:More"\n'
        '[project.entry-points."axlearn.plugins"]\none = "one.hooks"\n'
        '[project.entry-points."other.group"]\nx = "one:x"\n'
        '[tool.axlearn.index]\ntargets = ["chip"]\n',
    )
    empty = write_project(tmp_path / "empty", "empty", "")
    assert collect_names([one, empty]) == {"features": {"more": "one"}, "targets": {"chip": "one"}}
    write_index(tmp_path / "index.json", [one])
    assert json.loads((tmp_path / "index.json").read_text())["targets"] == {"chip": "one"}


def test_two_projects_with_one_name_have_no_index(tmp_path):
    points = '[project.entry-points."axlearn.features"]\nmore = "x:More"\n'
    folders = [write_project(tmp_path / name, name, points) for name in ("one", "two")]
    with pytest.raises(ValueError, match="features: one and two both declare 'more'"):
        collect_names(folders)


def add_index(install, content, name="theirs"):
    """A third party's index, whose package must not be imported."""
    package = f"{name}_index"
    root = install(f"{name}-index", modules={package: "raise AssertionError"}, points={"index": {name: package}})
    (root / f"{package}.py").unlink()
    folder = root / package
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError")
    if content is not None:
        (folder / "index.json").write_text(content)
    return folder


def index_findings():
    return list(examine_indexes())


def test_an_index_of_a_third_party(install):
    add_index(install, json.dumps({"features": {"sparkle": "their-plugins"}, "targets": {"chip": "their-chip"}}))
    assert find_package("features", "sparkle") == "their-plugins"
    assert find_package("targets", "chip-8") == "their-chip"
    assert find_package("features", "rope") == "axlearn-plugins-rope"
    with pytest.raises(
        RequestError, match=r"'sparkle' is not installed: their-plugins provides it\n.*pip install their-pl"
    ):
        registry().feature("sparkle")
    assert [(i.name, i.origin, i.problem) for i in indexes()][1] == ("theirs", ("theirs-index", "1.0"), None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "the package 'theirs_index' has no index.json"),
        ("{", "index.json of 'theirs_index' cannot be read: JSONDecodeError"),
        ("[]", "is not an index\n    expected: {group: {name: distribution}}"),
        ('{"features": ["rope"]}', "is not an index"),
        ('{"features": {"rope": 3}}', "is not an index"),
    ],
)
def test_a_broken_index_is_a_warning(install, content, problem):
    add_index(install, content)
    assert find_package("features", "rope") == "axlearn-plugins-rope"
    assert find_package("features", "sparkle") is None
    first, broken = index_findings()
    assert (first.status, first.distribution) == ("ok", "axlearn-index")
    assert (broken.status, broken.name, broken.distribution) == ("warning", "theirs", "theirs-index")
    assert problem in broken.message


def test_an_index_whose_package_is_gone_is_a_warning(install):
    (add_index(install, None) / "__init__.py").unlink()
    install("lost-index", points={"index": {"lost": "nowhere.lost_index"}})
    assert [f.status for f in index_findings()] == ["ok", "warning", "warning"]


def test_an_index_in_a_package_below_another_imports_neither(install):
    modules = {"their_tools": "raise SystemExit"}
    root = install("their-index", modules=modules, points={"index": {"theirs": "their_tools.names"}})
    (root / "their_tools.py").unlink()
    (root / "their_tools/names").mkdir(parents=True)
    (root / "their_tools/__init__.py").write_text("raise SystemExit")
    (root / "their_tools/names/index.json").write_text('{"features": {"sparkle": "their-plugins"}}')
    assert find_package("features", "sparkle") == "their-plugins"


def test_two_indexes_that_disagree(install):
    add_index(install, json.dumps({"features": {"rope": "their-rope"}}))
    assert find_package("features", "rope") == "axlearn-plugins-rope"
    *_, warning = index_findings()
    assert warning.status == "warning"
    assert (
        "features: assigns 'rope' to their-rope, but axlearn of axlearn-index assigns it to axlearn-plugins-rope"
        in (warning.message)
    )


def test_without_an_index_errors_say_how_to_get_one(monkeypatch):
    without(monkeypatch, "axlearn-index", "axlearn-plugins-rope", "axlearn-plugins-gpu", "axlearn-plugins-cloud")
    for ask in (lambda: registry().feature("rope"), lambda: find_machine("h100-8x4"), lambda: open_storage("s3://b/r")):
        with pytest.raises(RequestError) as caught:
            ask()
        assert "pip install axlearn-index" in str(caught.value)
    assert "known: " in command("features", "show", "rope")


def test_help_and_an_error_import_no_index():
    code = (
        "import sys; from axlearn_core.plugins.index import find_package; assert find_package('features', 'rope')\n"
        "assert not {'axlearn_index', 'attrs', 'jax'} & {*sys.modules}"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "axlearn_core/src")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


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
    assert find_package(group, name) == package
    error = not_installed_error(group, name)
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
    assert "'plan' is not installed: axlearn-plugins-plan provides it (pip install" in command("plan", "quickstart")
    assert "'import-hf' is not installed: axlearn-plugins-models provides it" in command("checkpoint", "import-hf")
    assert "Did you mean: train" in command("trian", "quickstart")
    assert "Did you mean: list" in command("checkpoint", "lits")


@pytest.mark.parametrize(
    "words", [("serve", "quickstart"), ("quickstart", "--serve"), ("quickstart", "--export", "x", "--serve")]
)
def test_a_subcommand_that_is_not_installed(monkeypatch, words):
    without(monkeypatch, "axlearn-plugins-serving")
    error = "`axlearn plan serve` is not installed: axlearn-plugins-serving provides it (pip install axlearn-plugins-serving)"
    assert error in command("plan", *words)
    assert "serve" not in CliRunner().invoke(cli, ["plan", "--help"]).stdout.partition("Commands:")[2]


def test_a_subcommand_whose_command_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-plan")
    assert "'plan' is not installed: axlearn-plugins-plan provides it" in command("plan", "serve", "quickstart")
    listed = CliRunner().invoke(cli, ["--help"]).stdout
    assert "plan-serve" not in listed
    assert "serve " in listed


def test_an_option_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-runtime")
    error = "--shadow is not installed: axlearn-plugins-runtime provides it (pip install axlearn-plugins-runtime)"
    assert error in command("train", "quickstart", "--shadow", "remat")


def test_features_experiments_and_targets_that_are_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-rope", "axlearn-plugins-models", "axlearn-plugins-gpu")
    assert "the feature 'rope' is not installed: axlearn-plugins-rope" in command("features", "show", "rope")
    assert "the experiment 'vit-tiny' is not installed: axlearn-plugins-models" in command("config", "show", "vit-tiny")
    with pytest.raises(RequestError, match="the target 'h100-8x4' is not installed: axlearn-plugins-gpu provides it"):
        find_machine("h100-8x4")


def test_a_function_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-serving")
    with pytest.raises(
        RequestError, match="the function 'serve' is not installed: axlearn-plugins-serving provides it"
    ):
        _ = ax.serve


def test_a_storage_that_is_not_installed(monkeypatch):
    without(monkeypatch, "axlearn-plugins-cloud")
    with pytest.raises(RequestError, match="axlearn-plugins-cloud supports s3://"):
        open_storage("s3://bucket/run")
