"""The router's handle for a worker: its process and connection."""

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
    """A worker process, which starts when this object is created.

    Attributes:
        kind: Kind of work, `prefill` or `decode`.
        number: Index among the workers of this kind.
        ready: The worker's `Ready` message; None before it arrives.
        failed: The worker's `Failed` message; None if it has not sent one.
        requests: Ids of the worker's requests.
        statistics: Latest statistics of the worker.
    """

    def __init__(self, kind: Kind, number: int, settings: Settings):
        self.kind: Kind = kind
        self.number = number
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.requests: set[str] = set()
        self.statistics: Statistics | None = None
        router_end, worker_end = socket.socketpair()
        with worker_end:
            command = [
                sys.executable,
                "-m",
                "axlearn_plugins_serving.disaggregated.engine_worker",
                str(worker_end.fileno()),
            ]
            self.process = subprocess.Popen(command, pass_fds=[worker_end.fileno()], stdout=sys.stderr)
        self.connection = multiprocessing.connection.Connection(router_end.detach())
        with contextlib.suppress(OSError):  # the worker has already exited; `receive` raises
            self.connection.send_bytes(pickle.dumps(settings))

    @property
    def name(self) -> str:
        """The worker's name in messages."""
        return f"{self.kind} worker {self.number} (process {self.process.pid})"

    def send(self, message: Any) -> bool:
        """Send a message. Returns False if the worker has exited; `receive` then raises."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: If the worker has exited.
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
        """Stop the process."""
        self.send(Close())
        self.connection.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
