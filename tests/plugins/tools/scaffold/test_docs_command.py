"""`axlearn docs`: finds the project, builds it strictly, serves it to this machine alone."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_plugins_tools.scaffold import site

CONF = 'extensions = ["myst_parser"]\nroot_doc = "docs/index"\ninclude_patterns = ["docs/**"]\nhtml_theme = "furo"\n'


@pytest.fixture
def project(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/conf.py").write_text(CONF)
    (tmp_path / "docs/index.md").write_text("# Home\n\nA tapir.\n")
    return tmp_path


def run(*words):
    return CliRunner().invoke(cli, ["docs", *words])


def test_a_folder_without_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--no-serve")
    assert result.exit_code == 2
    assert "no documentation to build" in result.stderr
    assert "docs/conf.py" in result.stderr


def test_the_extra_is_missing(project, monkeypatch):
    monkeypatch.chdir(project / "docs")
    monkeypatch.setattr(site, "NEEDS", ("sphinx", "no_such_module"))
    result = run("--no-serve")
    assert result.exit_code == 2
    assert "needs no_such_module, which is not installed" in result.stderr
    assert "axlearn-plugins-tools[docs]" in result.stderr
    assert not (project / "build").exists()


def test_a_folder_that_cannot_be_written(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "file").write_text("")
    result = run("--no-serve", "--out", "file/site")
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_a_port_that_is_taken(project, monkeypatch):
    monkeypatch.chdir(project)
    with site.open_server(0) as server:
        result = run("--port", str(server.server_address[1]))
    assert result.exit_code == 2
    assert "is in use" in result.stderr
    assert not (project / "build").exists()


@pytest.mark.slow
def test_it_builds_and_a_broken_link_is_an_error(project, monkeypatch):
    monkeypatch.chdir(project)
    assert run("--no-serve").exit_code == 0
    assert "tapir" in (project / "build/site/docs/index.html").read_text()
    (project / "docs/index.md").write_text("# Home\n\n[Gone](gone.md)\n")
    result = run("--no-serve")
    assert result.exit_code == 1
    assert "has the errors above" in result.stderr


@pytest.mark.slow
def test_it_serves_until_it_is_stopped(project):
    command = [sys.executable, "-m", "axlearn_core", "docs", "--port", "0"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        try:
            assert Path(process.stdout.readline().strip()) == project / "build/site"
            url = process.stderr.readline().split()[0]
            assert url.startswith("http://127.0.0.1:")
            assert b"tapir" in urllib.request.urlopen(f"{url}docs/index.html", timeout=20).read()
        finally:
            process.terminate()
