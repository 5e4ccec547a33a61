"""`axlearn plugins new` writes a package that is installed, listed, explained, selected by name, and passes its tests."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli


def axlearn(*words, cwd, site=None, code=0):
    path = os.pathsep.join(filter(None, [site and str(site), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "axlearn_core", *words]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert process.returncode == code, process.stderr
    return process.stdout if not code else process.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    axlearn("plugins", "new", "my-gate", cwd=folder)
    return folder / "axlearn-plugins-my-gate"


@pytest.fixture(scope="module")
def site(package, tmp_path_factory) -> Path:
    """The package as installed: its sources and its metadata, made from its pyproject.toml."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(package / "src", site, dirs_exist_ok=True)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / "axlearn_plugins_my_gate-0.1.0.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {r}\n" for r in project["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n{requires}")
    points = "".join(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)
    return site


@pytest.mark.slow
def test_it_is_listed_shown_and_selected_by_name(package, site, tmp_path):
    assert "axlearn-plugins-my-gate" in axlearn("plugins", "list", cwd=tmp_path, site=site)
    assert "Replaces every RMSNorm with my-gate" in axlearn("features", "show", "my-gate", cwd=tmp_path, site=site)
    (tmp_path / "mine.yaml").write_text(
        "experiment: quickstart\nset:\n  model.decoder.norm: {type: my-gate, alpha: 0.8}\n"
    )
    explanation = axlearn("config", "explain", "mine.yaml", "model.decoder.norm.alpha", cwd=tmp_path, site=site)
    assert "mine.yaml:3" in explanation


@pytest.mark.slow
def test_its_own_tests_pass(package, site):
    env = os.environ | {"PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    process = subprocess.run(command, cwd=package, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("My_Gate", "lower-case words"),
        ("rope", "already used by"),
        ("3d", "lower-case words"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["plugins", "new", name])
    assert result.exit_code == 2
    assert says in result.stderr
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(package):
    before = {p: p.read_bytes() for p in package.rglob("*") if p.is_file()}
    message = axlearn("plugins", "new", "my-gate", cwd=package.parent, code=2)
    assert "already exists" in message
    assert {p: p.read_bytes() for p in package.rglob("*") if p.is_file()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in axlearn("plugins", "new", "my-gate", "--path", "file/x", cwd=tmp_path, code=2)
