"""Plugins that do what they must not, or are broken: named, and the others go on."""

import json
import os
import subprocess
import sys

import pytest

from axlearn_plugins_tools.doctor.core_integrity import replaced_attributes

MODULES = {
    "evil_zero": """
import axlearn_core.errors as errors

def nearest(name, candidates, limit=3):
    return ()

errors.nearest = nearest
errors.Problem.__str__ = lambda self: "all is well"
""",
    "evil_unmarked": """
def axlearn_targets():
    return []

def axlearn_kernel():
    return []
""",
    "evil_broken": "raise RuntimeError('broken on purpose')\n",
}


@pytest.fixture
def hostile(tmp_path):
    """An environment in which three bad plugins are installed, one of which also claims what another package has."""
    for i, (module, source) in enumerate(MODULES.items()):
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\nRequires-Dist: axlearn-core>=0.1\n"
        )
        points = f"[axlearn.plugins]\n{module} = {module}\n"
        if i == 2:
            points += "[axlearn.features]\nrope = evil_broken:Rope\nbroken = evil_broken:Broken\n"
        (info / "entry_points.txt").write_text(points)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}


def axlearn(environment, *arguments):
    command = [sys.executable, "-m", "axlearn_core", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.slow
def test_the_doctor_names_them_all_and_goes_on(hostile):
    result = axlearn(hostile, "plugins", "doctor", "--json")
    assert result.returncode == 1, result.stderr[-2000:]
    findings = json.loads(result.stdout)
    errors = {f["name"]: f["message"] for f in findings if f["status"] == "error"}
    assert "evil_zero.py" in errors["axlearn_core.errors.nearest"]
    assert "evil_zero.py" in errors["axlearn_core.errors.Problem.__str__"]
    unmarked = [f["message"] for f in findings if f["name"] == "evil_unmarked" and f["status"] == "error"]
    assert any("axlearn_targets lacks @hookimpl" in m for m in unmarked)
    assert any("axlearn_kernel lacks @hookimpl" in m and "did you mean: axlearn_kernels" in m for m in unmarked)
    assert "broken on purpose" in errors["evil_broken"]
    assert "2 distributions register the feature 'rope'" in errors["rope"]
    assert sum(f["status"] == "ok" for f in findings) > 150


@pytest.mark.slow
def test_listings_mark_them_and_go_on(hostile):
    for arguments in (("features", "list"), ("experiments", "list"), ("plugins", "list"), ("--help",)):
        result = axlearn(hostile, *arguments)
        assert result.returncode == 0, (arguments, result.stderr[-2000:])
        assert "Traceback" not in result.stderr
    result = axlearn(hostile, "features", "list")
    rope = [line for line in result.stdout.splitlines() if line.startswith("rope ")]
    assert len(rope) == 2
    assert all("registered by 2 distributions" in line for line in rope)
    assert any(line.startswith("moe ") and "claimed" not in line for line in result.stdout.splitlines())


def test_what_is_installed_here_replaces_nothing():
    import axlearn_core.train.trainer  # noqa: F401  # with most of the core

    assert list(replaced_attributes()) == []
