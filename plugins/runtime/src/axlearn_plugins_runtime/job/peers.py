"""Reports of lost processes in a job, with the newest checkpoint and the command to resume."""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax

from axlearn_core.compat import coordination_client, coordinator_address
from axlearn_core.run.events import RunListener
from axlearn_core.run.notices import log_message

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0
"""Seconds without a heartbeat before a process is reported as lost. JAX ends the job later, based on its own heartbeats."""
BEATS, _LOST = "axlearn/beats/", "axlearn/lost"
_NOTICE = """
last=
while IFS= read -r line; do last=$line; done
[ -z "$last" ] || printf 'error: %s; noticed at %s\\n' "$last" "$(date -u +%H:%M:%S) UTC" >&2
"""
"""Shell script that prints the last line of its input when the input ends.

If the coordinator is lost, JAX aborts the process before any Python code can run."""


class PeerWatch(RunListener):
    """Sends heartbeats to the other processes of a job, and reports processes that stop sending them.

    It does nothing in a single-process job or under a supervisor (`AXLEARN_JOB`), which reports lost processes itself.

    Args:
        run: The run directory or URI.
        notify: Prints one line to the user.
    """

    def __init__(self, run: str, notify: Callable[[str], None] = log_message):
        self.run, self.notify = run, notify
        self.newest_step: Callable[[], int] = lambda: 0
        self.rank = jax.process_index()
        self._closed = threading.Event()
        self._notice: subprocess.Popen[str] | None = None
        self._beats: dict[str, tuple[str, float, str]] = {}
        self._reported: set[str] = set()
        self._notice_step = -1
        self._thread: threading.Thread | None = None

    def restored(self, run: Any) -> None:
        """Start watching."""
        self.start(lambda: run.kept_step)

    def start(self, newest_step: Callable[[], int]) -> None:
        """Start watching.

        Args:
            newest_step: Returns the newest step that is known to be saved, or 0.
        """
        self.newest_step = newest_step
        if jax.process_count() == 1 or os.environ.get("AXLEARN_JOB"):
            return
        if self.rank and shutil.which("sh"):
            words = ["sh", "-c", _NOTICE]
            self._notice = subprocess.Popen(
                words, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True, stdout=subprocess.DEVNULL
            )
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def closed(self) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching. Afterwards, the shell does not report the exit of this process."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._withdraw_notice()

    def _watch(self) -> None:
        client, number, pause = coordination_client(), 0, beat_pause(jax.process_count())
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone; the shell prints the notice
            while True:
                number += 1
                self.beat(client, number, pause)
                if self._wait(pause):
                    client.key_value_set(f"{BEATS}{self.rank}", "ended", allow_overwrite=True)
                    return

    def beat(self, client: Any, number: int, pause: float) -> None:
        """Send a heartbeat. On process 0, check the heartbeats of the others. Otherwise, print process 0's report.

        Args:
            client: Client of the coordinator.
            number: Number of heartbeats that were sent, including this one.
            pause: Seconds between heartbeats.
        """
        text = f"{number} on {socket.gethostname()} (process {os.getpid()})"
        client.key_value_set(f"{BEATS}{self.rank}", text, allow_overwrite=True)
        if self.rank == 0:
            self._check_beats(client, dict(client.key_value_dir_get(BEATS)), pause)
        else:
            self._relay_report(client)

    def _wait(self, seconds: float) -> bool:
        """Wait and keep the notice up to date. Return True if the watch was closed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._update_notice()
            if self._closed.wait(1.0):
                return True
        return False

    def _check_beats(self, client: Any, beats: dict[str, str], pause: float) -> None:
        """Compare the heartbeats with the previous ones."""
        now = time.monotonic()
        for key, text in beats.items():
            rank = key.rpartition("/")[2]
            if self._beats.get(rank, ("",))[0] != text:
                if rank in self._reported and text != "ended":
                    self._reported.discard(rank)
                    self.notify(f"process {rank} sends heartbeats again")
                self._beats[rank] = (text, now, datetime.now(UTC).strftime("%H:%M:%S"))
        for rank, (text, since, clock) in self._beats.items():
            if text != "ended" and now - since > LOST_SECONDS + pause and rank not in self._reported:
                self._reported.add(rank)
                location = text.partition(" on ")[2]
                line = f"process {rank} on {location} has sent no heartbeat since {clock} UTC; {self._resume_hint()}"
                client.key_value_set(_LOST, line, allow_overwrite=True)
                self.notify(f"error: {line}")

    def _relay_report(self, client: Any) -> None:
        """Print the report of process 0 once."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no process is lost
            line = client.key_value_try_get(_LOST)
            if line not in self._reported:
                self._reported.add(line)
                self.notify(f"error: {line}")
                self._withdraw_notice()

    def _resume_hint(self) -> str:
        step = self.newest_step()
        newest = f"step {step} of {self.run}" if step > 0 else "none yet"
        is_axlearn_command = os.path.basename(sys.argv[0]) in ("axlearn", "__main__.py")
        command = (
            f"`axlearn {shlex.join(sys.argv[1:])}` on every host"
            if is_axlearn_command
            else "the same program on every host"
        )
        return f"newest checkpoint: {newest}; to resume: {command}"

    def _update_notice(self) -> None:
        """Send the shell the line to print if this process is aborted."""
        step = self.newest_step()
        if self._notice is None or self._notice.stdin is None or step == self._notice_step:
            return
        self._notice_step = step
        coordinator = coordinator_address() or "its coordinator"
        text = f"process {self.rank} lost its connection to process 0 at {coordinator}, or was killed; {self._resume_hint()}"
        with contextlib.suppress(OSError):
            self._notice.stdin.write(text.replace("\n", " ") + "\n")

    def _withdraw_notice(self) -> None:
        """Exit the shell without printing the notice."""
        notice, self._notice = self._notice, None
        if notice is not None and notice.stdin is not None:
            with contextlib.suppress(OSError):
                notice.stdin.write("\n")
                notice.stdin.close()
            notice.wait(10)


def beat_pause(processes: int) -> float:
    """Return the seconds between heartbeats. One process receives all of them."""
    return max(BEAT_SECONDS, processes / 200)


def peer_watch(session: Any) -> PeerWatch:
    """Return the listener for a run."""
    return PeerWatch(session.uri or str(session.path))
