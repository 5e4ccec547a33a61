"""The site of a project's documentation: Sphinx builds it, and a small server shows it."""

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
"""Modules of the extra `docs`."""
ADDRESS = "127.0.0.1"


def project_folder(start: Path) -> Path:
    """The nearest folder at or above `start` with a `docs/conf.py`.

    Raises:
        RequestError: there is none.
    """
    for folder in (start, *start.parents):
        if (folder / "docs/conf.py").is_file():
            return folder
    raise RequestError(
        f"no documentation to build: neither {start} nor a folder above it has docs/conf.py\n"
        "    fix: go to a clone of the repository; `axlearn --help` explains the commands without it"
    )


def build_site(project: Path, out: Path) -> Path:
    """Builds the site of `project` in `out` and returns `out`. Unchanged pages are not built again.

    Raises:
        RequestError: the extra `docs` is not installed, or `out` is not a folder that can be written.
        WorkError: Sphinx has found something wrong; it has printed what.
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
        raise RequestError(f"{out} cannot be written: {error.strerror}\n    fix: name another with --out") from error
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
    command += ["-c", str(project / "docs"), "-d", str(out.parent / f".{out.name}-cache"), str(project), str(out)]
    # Docstrings are read from imported modules, and no import may take an accelerator from a run.
    result = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=project)
    if result.returncode:
        raise WorkError(f"the documentation of {project} has the errors above\n    fix: mend them, then run this again")
    return out


class SiteServer(ThreadingHTTPServer):
    """Serves one folder, to this machine alone."""

    daemon_threads = True

    def serve_folder(self, folder: Path) -> None:
        """Answers requests until Ctrl-C."""
        self.RequestHandlerClass = functools.partial(_QuietHandler, directory=str(folder))  # type: ignore[assignment]
        echo(f"http://{ADDRESS}:{self.server_address[1]}/  (Ctrl-C stops)", err=True)
        self.serve_forever(poll_interval=0.2)


class _QuietHandler(SimpleHTTPRequestHandler):
    """Without a line on the terminal for each file."""

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def open_server(port: int) -> SiteServer:
    """Takes the port. Raises `RequestError` where another program has it."""
    try:
        return SiteServer((ADDRESS, port), _QuietHandler)
    except OSError as error:
        raise RequestError(
            f"port {port} of {ADDRESS} is taken: {error.strerror}\n    fix: --port 0 takes a free one"
        ) from error
