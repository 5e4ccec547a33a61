"""Actions that a watchdog runs when a rule is broken."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any, Protocol
from urllib.parse import urlsplit

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import RequestError

RESTART = 75
"""Exit code of a process that asks to be restarted: EX_TEMPFAIL in sysexits.h."""


class Action(Protocol):
    """Handles an incident. It must not raise or block."""

    def __call__(self, incident: Mapping[str, Any], run_dir: Path) -> None:
        """Handle an incident.

        Args:
            incident: The line of `watchdog.jsonl`: time, rule, message, phase, step, rank, host and pid.
            run_dir: Run directory.
        """
        ...


class DumpStacks(Configurable):
    """Writes the stacks of all threads in this process and its child processes to `<run>/stacks-RANK.txt`.

    The stacks of child processes (data workers) are included if the `py-spy` program is installed.
    """

    @node
    class Config(Configurable.Config["DumpStacks"]):
        """No settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, incident: Mapping[str, Any], run_dir: Path) -> None:
        """See `Action`."""
        with stacks_path(run_dir, incident["rank"]).open("a") as file:
            file.write(f"\n== {incident['time']} {incident['rule']}: {incident['message']}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            for child in _children(os.getpid()):
                file.write(f"\n-- child process {child}: {_command(child)}\n")
                if which("py-spy"):
                    file.write(_output("py-spy", "dump", "--pid", str(child)))


class StopRun(Configurable):
    """Asks the run to save and stop, as SIGTERM does. Has no effect on a run that hangs."""

    @node
    class Config(Configurable.Config["StopRun"]):
        """No settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, incident: Mapping[str, Any], run_dir: Path) -> None:
        """See `Action`."""
        os.kill(os.getpid(), signal.SIGTERM)


class RestartProcess(Configurable):
    """Ends this process immediately with exit code 75, without saving. A supervisor then restarts it.

    The steps since the last checkpoint are lost. Without a supervisor the run ends.
    """

    @node
    class Config(Configurable.Config["RestartProcess"]):
        """No settings."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __call__(self, incident: Mapping[str, Any], run_dir: Path) -> None:
        """See `Action`."""
        sys.stderr.flush()
        os._exit(RESTART)


class Webhook(Configurable):
    """Posts the incident as JSON to a URL. The URL comes from an environment variable because it is often a secret.

    Raises:
        RequestError: The variable is not set, or is not an http or https URL.
    """

    @node
    class Config(Configurable.Config["Webhook"]):
        """Source of the URL, and the time limit for requests.

        Attributes:
            variable: Name of the environment variable that contains the URL.
            seconds: Time limit for a request.
        """

        variable: str = "AXLEARN_WEBHOOK"
        seconds: float = setting(default=10.0, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.url = os.environ.get(cfg.variable, "")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise RequestError(
                f"the watchdog's webhook has no URL: the environment variable {cfg.variable} "
                f"{'is not an http or https URL' if self.url else 'is not set'}\n"
                f"    fix: set {cfg.variable}, or remove the action `webhook`"
            )

    def __call__(self, incident: Mapping[str, Any], run_dir: Path) -> None:
        """See `Action`."""
        threading.Thread(target=self._post, args=(dict(incident),), name="watchdog-webhook", daemon=True).start()

    def _post(self, incident: dict[str, Any]) -> None:
        data = json.dumps({**incident, "text": f"{incident['rule']}: {incident['message']}"}).encode()
        request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.cfg.seconds):
                pass
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            print(f"watchdog: the webhook cannot be reached: {reason}", file=sys.stderr, flush=True)


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the file with a process's stack traces."""
    return run_dir / f"stacks-{rank}.txt"


def timestamp() -> str:
    """Return the current UTC time in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _children(pid: int) -> list[int]:
    """Return the child processes of `pid`. Returns an empty list on systems other than Linux."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return sorted({int(child) for path in paths for child in path.read_text().split()})
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        state = Path(f"/proc/{pid}/status").read_text().partition("State:")[2].partition("\n")[0].strip()
    except OSError:
        return "gone"
    return f"{state}: {command}"


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return result.stdout + result.stderr
