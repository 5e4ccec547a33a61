"""A worker as the router sees it: a process and its connection."""

import contextlib
import multiprocessing.connection
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

from axlearn_plugins_serving.contracts import Statistics
from axlearn_plugins_serving.disaggregated.engine_worker import Settings
from axlearn_plugins_serving.disaggregated.router_messages import Close, Failed, Ready, Report

Kind = Literal["prefill", "decode"]
_END_SECONDS = 10.0


class WorkerProcess:
    """Starts a worker.

    Attributes:
        kind: what it computes.
        number: of its kind, from 0 on.
        ready: what it said when it took requests; None before.
        failed: why it cannot start; None where nothing is known.
        requests: the ids of those that it has.
        statistics: its newest counters.
    """

    def __init__(self, kind: Kind, number: int, settings: Settings):
        self.kind: Kind = kind
        self.number = number
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.requests: set[str] = set()
        self.statistics: Statistics | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "axlearn_plugins_serving.disaggregated.engine_worker",
                str(theirs.fileno()),
            ]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=sys.stderr)
        self.connection = multiprocessing.connection.Connection(ours.detach())
        with contextlib.suppress(OSError):  # it ended at once: `receive` tells
            self.connection.send_bytes(pickle.dumps(settings))

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} worker {self.number} (process {self.process.pid})"

    def send(self, message: Any) -> bool:
        """Sends a message; False where the worker has ended, which `receive` tells too."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[Any]:
        """The messages that are there.

        Raises:
            EOFError: the worker has ended.
        """
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Ready):
                    self.ready = message
                elif isinstance(message, Failed):
                    self.failed = message
                elif isinstance(message, Report) and message.statistics is not None:
                    self.statistics = message.statistics
                yield message
        except (OSError, pickle.UnpicklingError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Ends the process."""
        self.send(Close())
        self.connection.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
