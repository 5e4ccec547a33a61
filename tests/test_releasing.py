"""Releases: metadata, version ranges between distributions, wheels, and plugins with the oldest core that they support."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

from support.paths import ROOT

MEMBERS = [p.parent for folder in ("", "plugins") for p in sorted((ROOT / folder).glob("*/pyproject.toml"))]
PROJECTS = {p.name: tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in MEMBERS}
CORE = PROJECTS["axlearn_core"]
INDEX = PROJECTS["axlearn_index"]  # a data package that the core requires


def own_requirements(project):
    """Return the requirements on other distributions of this repository."""
    extras = project.get("optional-dependencies", {}).values()
    every = [Requirement(r) for r in (*project.get("dependencies", ()), *(r for extra in extras for r in extra))]
    return [r for r in every if r.name.startswith("axlearn-")]


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS.keys())
def test_metadata(project):
    assert project["version"] == CORE["version"], "all are released together"
    assert 30 <= len(project["description"]) <= 150
    assert project["description"].endswith(".")
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert project["requires-python"] == CORE["requires-python"] == ">=3.11,<3.14"
    classifiers = set(project["classifiers"])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= classifiers
    assert any(c.startswith("Development Status ::") for c in classifiers)
    assert not any(c.startswith("License ::") for c in classifiers), "`license` says it"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda p: p.name)
def test_the_long_description_has_no_links_into_the_repository(member):
    text = (member / "README.md").read_text()
    assert text.startswith(f"# {PROJECTS[member.name]['name']}\n")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS.keys())
def test_ranges_between_distributions_hold_the_version_of_today(project):
    requirements = own_requirements(project)
    assert project in (CORE, INDEX) or "axlearn-core" in {r.name for r in requirements}
    for requirement in requirements:
        operators = {s.operator for s in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement}: a floor, and a ceiling below the next incompatible version"
        assert requirement.specifier.contains(CORE["version"]), f"{requirement} leaves out {CORE['version']}"


def oldest_cores():
    """Return the lowest versions of the core that the plugins support."""
    floors = set()
    for project in PROJECTS.values():
        for requirement in own_requirements(project):
            if requirement.name == "axlearn-core":
                floors |= {Version(s.version) for s in requirement.specifier if s.operator == ">="}
    return sorted(floors)


def sources_of(version, folder):
    """Return a folder with the package `axlearn_core` of a version: the current one, or its tag."""
    if version == Version(CORE["version"]):
        return ROOT / "axlearn_core/src"
    command = ["git", "-C", str(ROOT), "archive", f"v{version}", "axlearn_core/src"]
    result = subprocess.run(command, capture_output=True)
    assert result.returncode == 0, f"v{version} is claimed and not tagged: {result.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "axlearn_core/src"


def test_plugins_claim_a_core():
    assert oldest_cores()
    assert max(oldest_cores()) <= Version(CORE["version"])


@pytest.mark.slow
@pytest.mark.parametrize("version", oldest_cores(), ids=str)
def test_plugins_work_with_the_oldest_core_that_they_claim(version, tmp_path):
    source = sources_of(version, tmp_path)
    env = os.environ | {"PYTHONPATH": str(source)}
    code = (
        "import sys, axlearn_core; from axlearn_core.cli.main import main; sys.argv = ['axlearn', 'plugins', 'doctor']\n"
        "print(axlearn_core.__file__, file=sys.stderr); main()"
    )
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert result.stderr.startswith(str(source)), result.stderr[-2000:]
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]


def test_a_version_that_was_never_tagged_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"v0\.0\.0 is claimed and not tagged"):
        sources_of(Version("0.0.0"), tmp_path)


def skip_without_build_tools(result):
    """Skip if uv, offline, has no hatchling, setuptools or jaxlib in its cache. Any other build failure is an error."""
    if result.returncode and "because the network was disabled" in result.stderr:
        pytest.skip("needs hatchling, setuptools and jaxlib in the cache of uv: uv sync --all-packages --refresh")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["c++", "false"], ids=["a compiler", "no compiler"])
def test_the_library_is_in_the_wheel_where_it_can_be_built(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a compiler: install {compiler}")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "axlearn_plugins_cpu", source, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))

    def build(**variables):
        command = ["uv", "build", "--wheel", "--offline", "--out-dir", str(tmp_path), str(source)]
        env = os.environ | {"CC": compiler, "CXX": compiler} | variables
        return subprocess.run(command, env=env, capture_output=True, text=True)

    result = build()
    skip_without_build_tools(result)
    assert result.returncode == 0, result.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert libraries == (["axlearn_plugins_cpu/_native.abi3.so"] if compiler == "c++" else [])
    assert not any("/native/" in name for name in names), "sources are for the source distribution"
    if compiler == "false":
        assert build(AXLEARN_NATIVE="required").returncode != 0


@pytest.mark.slow
def test_wheels(tmp_path):
    command = ["uv", "build", "--all-packages", "--wheel", "--offline", "--out-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    skip_without_build_tools(result)
    assert result.returncode == 0, result.stderr[-3000:]
    wheels = sorted(tmp_path.glob("*.whl"))
    assert len(wheels) == len(MEMBERS)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (file,) = [n for n in names if n.endswith(".dist-info/METADATA")]
            metadata = Metadata.from_email(archive.read(file))  # raises if an index would reject the metadata
        assert metadata.description_content_type == "text/markdown", wheel.name
        assert metadata.description.startswith("# axlearn"), wheel.name
        assert any(n.endswith("licenses/LICENSE") for n in names), wheel.name
        assert any(n.endswith("py.typed") for n in names), wheel.name
        tests = [n for n in names if n.startswith("tests/") or "/tests/" in n]
        assert all(n.endswith(".template") for n in tests), wheel.name  # the package from `plugins new`
