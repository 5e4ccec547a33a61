"""A process that checks some of the properties of a proof, and its handle."""

import contextlib
import multiprocessing.connection
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from axlearn_plugins_verify.prove.case import Case

ENDED = (OSError, EOFError, pickle.UnpicklingError)
"""Errors of a connection whose process has ended."""
SECONDS = 5.0
"""Time for a process to end by itself."""


class HelperProcess:
    """The handle of a helper. `start` creates it."""

    def __init__(self, message: bytes):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
        self._connection = multiprocessing.connection.Connection(ours.detach())
        self._message: bytes | None = message

    @classmethod
    def start(cls, cases: Sequence[Case]) -> "HelperProcess | None":
        """Start a helper for a case and its seeds. Returns None if another process cannot read the config.

        An example is a config with a class that the `__main__` module defines.
        """
        (first, *_), seeds = cases, [case.seed for case in cases]
        try:
            message = pickle.dumps((first.config, first.original, first.meshes, first.target, seeds))
        except Exception:  # a class of the config decides how it is pickled
            return None
        return None if b"__main__" in message else cls(message)

    def check(self, number: int, name: str) -> Any:
        """Return the `Check` of a property with the seed of this number, or None if the process has ended."""
        try:
            if (
                self._message is not None
            ):  # sent by the thread that waits for the result, because the process is still starting
                self._connection.send_bytes(self._message)
                self._message = None
            self._connection.send((number, name))
            return self._connection.recv()
        except ENDED:
            return None

    def close(self) -> None:
        """Stop the process."""
        self._connection.close()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(descriptor: int) -> None:
    """Answer the requests of a `HelperProcess` until it closes the connection."""
    from axlearn_core.compose.devices import configure_devices
    from axlearn_core.plugins.targets import find_machine
    from axlearn_plugins_verify.prove.checks import check_property
    from axlearn_plugins_verify.prove.proof import DEVICES, properties

    configure_devices(find_machine(f"cpu-{DEVICES}"))
    with multiprocessing.connection.Connection(descriptor) as connection:
        config, original, meshes, target, (seed, *others) = pickle.loads(connection.recv_bytes())
        case = Case(config, original=original, meshes=meshes, seed=seed, target=target)
        cases, chosen = [case, *(case.with_seed(other) for other in others)], properties()
        while True:
            number, name = connection.recv()
            connection.send(check_property(name, chosen[name], cases[number]))


if __name__ == "__main__":
    with contextlib.suppress(*ENDED, KeyboardInterrupt):
        run(int(sys.argv[1]))
