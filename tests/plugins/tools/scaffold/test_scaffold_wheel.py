"""A plugin from `axlearn plugins new` to a wheel that somebody else installs and uses by name."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

needs_uv = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, which builds and installs wheels")


def call(*command, cwd, **env):
    result = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
@needs_uv
def test_what_is_published_is_found_by_name(tmp_path):
    axlearn = (sys.executable, "-m", "axlearn_core")
    call(*axlearn, "plugins", "new", "my-gate", cwd=tmp_path)
    call("uv", "build", "-q", "--wheel", "axlearn-plugins-my-gate", "--out-dir", "dist", cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == "axlearn_plugins_my_gate-0.1.0-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests", "conftest"))]
    call("uv", "pip", "install", "-q", "--no-deps", "--target", "site", str(wheel), cwd=tmp_path)
    site = str(tmp_path / "site")
    assert "my-gate" in call(*axlearn, "features", "show", "my-gate", cwd=tmp_path, PYTHONPATH=site)
    words = ("config", "diff", "quickstart", "quickstart", "--with", "my-gate")
    assert "rms-norm -> my-gate" in call(*axlearn, *words, cwd=tmp_path, PYTHONPATH=site)
