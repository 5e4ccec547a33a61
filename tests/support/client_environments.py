"""Environments of API clients: packages from registries that must not change the environment of the tests."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

UNREACHABLE = re.compile(
    r"error sending request|network was disabled|npm error code (E\w*CONN\w*|ENO\w+|EAI_AGAIN|E\w*TIMEDOUT)"
)
"""Errors of uv and npm without a registry."""
ENVIRONMENT = dict(os.environ)
"""The environment before fixtures hide the certificates that installers need."""
SECONDS = 280
"""Maximum duration of an installation."""


def python_environment(cache: Path, requirements: Path) -> Path:
    """Create a virtual environment, or reuse the one of an earlier run, and return its interpreter.

    Args:
        cache: Folder of the environments.
        requirements: Absolute path of a file with pinned requirements.
    """
    uv = _tool("uv")
    folder = cache / requirements.stem
    python = folder / "bin/python"
    outside = Path(tempfile.gettempdir())  # because uv applies the constraints of the workspace that it runs in
    with _building(folder, sys.version + requirements.read_text()) as build:
        if build:
            _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], outside)
            _run([uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)], outside)
    return python


def node_environment(cache: Path, package: Path) -> Path:
    """Install the dependencies of a `package.json`, or reuse them, and return the folder that has them.

    Args:
        cache: Folder of the environments.
        package: The `package.json`. The other files of its folder, such as scripts, are copied to the environment.
    """
    _tool("node")
    npm = _tool("npm")
    folder = cache / "node"
    with _building(folder, package.read_text()) as build:
        if build:
            folder.mkdir()
            shutil.copy(package, folder)
            _run([npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=1"], folder)
        for script in package.parent.glob("*.mjs"):
            shutil.copy(script, folder)
    return folder


def run_script(command: list[str], url: str, kinds: list[str], text_limit: int) -> dict[str, dict[str, object]]:
    """Run the script of a client and return the report that it prints.

    Args:
        command: Interpreter and script.
        url: Address of the server.
        kinds: Kinds of requests to send.
        text_limit: Maximum number of tokens of a text.
    """
    environment = os.environ | {"SERVER_URL": url, "TEXT_LIMIT": str(text_limit), "PYTHONWARNINGS": "ignore"}
    environment["HF_HUB_OFFLINE"] = "0"  # or huggingface_hub refuses even a server on this machine
    result = subprocess.run([*command, *kinds], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@contextlib.contextmanager
def _building(folder: Path, contents: str):
    """Lock an environment. Yield whether it has to be built, in which case the folder does not exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder.with_name(f"{folder.name}.built")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build = not stamp.exists() or stamp.read_text() != contents
        if build:
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        yield build
        if build:
            stamp.write_text(contents)


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} on the PATH")
    return path


def _run(command: list[str], folder: Path) -> None:
    """Run an installer. Skip the test if there is no registry or no wheel of PyTorch for CPUs."""
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    if result.returncode and UNREACHABLE.search(result.stderr):
        pytest.skip(f"needs a package registry for {Path(command[0]).name}: {result.stderr.splitlines()[0]}")
    if result.returncode and "no version of torch==" in result.stderr:
        pytest.skip("needs a wheel of PyTorch for CPUs: set UV_FIND_LINKS to its folder")
    assert result.returncode == 0, result.stderr[-4000:]
