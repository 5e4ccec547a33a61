"""Build the documentation of a project with Sphinx, and serve it."""

import functools
import importlib.util
import os
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError, WorkError

NEEDS = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
"""Modules of the `docs` extra."""
ADDRESS = "127.0.0.1"


def project_folder(start: Path) -> Path:
    """Return the nearest folder at or above `start` that contains `docs/conf.py`.

    Raises:
        RequestError: If there is no such folder.
    """
    for folder in (start, *start.parents):
        if (folder / "docs/conf.py").is_file():
            return folder
    raise RequestError(
        f"no documentation to build: neither {start} nor a folder above it has docs/conf.py\n"
        "    fix: run this in a clone of the repository, or see `axlearn --help` for the commands"
    )


def build_site(project: Path, out: Path) -> Path:
    """Build the site of `project` in `out` and return `out`. Unchanged pages are not rebuilt.

    Raises:
        RequestError: If the `docs` extra is not installed, or `out` is not a writable folder.
        WorkError: If Sphinx reports errors or warnings, which it has already printed.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"building the documentation needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed\n"
            '    fix: pip install "axlearn-plugins-tools[docs]"'
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror}\n    fix: use another --out") from error
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
    command += ["-c", str(project / "docs"), "-d", str(out.parent / f".{out.name}-cache"), str(project), str(out)]
    # Sphinx imports modules to read their docstrings. Keep these imports from using accelerators that a run may need.
    result = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=project)
    if result.returncode:
        raise WorkError(
            f"the documentation of {project} has the errors above\n    fix: correct them, then run this again"
        )
    return out


class SiteServer(ThreadingHTTPServer):
    """Serves one folder, listening only on the loopback interface."""

    daemon_threads = True

    def serve_folder(self, folder: Path) -> None:
        """Serve `folder` until Ctrl-C."""
        self.RequestHandlerClass = functools.partial(_QuietHandler, directory=str(folder))  # type: ignore[assignment]
        echo(f"http://{ADDRESS}:{self.server_address[1]}/  (press Ctrl-C to stop)", err=True)
        self.serve_forever(poll_interval=0.2)


class _QuietHandler(SimpleHTTPRequestHandler):
    """Request handler that does not log requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def open_server(port: int) -> SiteServer:
    """Bind the port. Raise `RequestError` if it is in use."""
    try:
        return SiteServer((ADDRESS, port), _QuietHandler)
    except OSError as error:
        raise RequestError(
            f"port {port} of {ADDRESS} is in use: {error.strerror}\n    fix: use --port 0 to pick a free port"
        ) from error
