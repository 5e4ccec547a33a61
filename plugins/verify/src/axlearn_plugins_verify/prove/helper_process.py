"""A process that checks some of the properties of a proof, and its handle."""

import contextlib
import multiprocessing.connection
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from axlearn_core.run.notices import log_message
from axlearn_plugins_verify.prove.case import Case

DEVICES = 8
"""Number of virtual CPU devices of a proof."""
GRACE_SECONDS = 5.0
"""Time for a process to end after it is told to."""


class HelperProcess:
    """The handle of a helper. `start` creates it."""

    def __init__(self, message: bytes):
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = multiprocessing.connection.Connection(ours.detach())
        self._message: bytes | None = message

    @classmethod
    def start(cls, cases: Sequence[Case]) -> "HelperProcess | None":
        """Start a helper for a case and its seeds. Returns None if another process cannot check it as this one does.

        Examples are a config with a class of the `__main__` module, and a session that already uses a GPU.
        """
        if jax.default_backend() != "cpu" or len(jax.devices()) != DEVICES:
            return None
        (first, *_), seeds = cases, [case.seed for case in cases]
        try:
            message = pickle.dumps((first.config, first.original, first.meshes, first.target, seeds))
            return None if b"__main__" in message else cls(message)
        except Exception:  # a class decides how it is pickled, and systems differ in how processes start
            return None

    def check(self, number: int, name: str) -> Any:
        """Return the `Check` of a property with the seed of this number, or None if the process has ended."""
        try:
            # The process is still starting, so the thread that waits for the result sends it the case.
            if self._message is not None:
                self._connection.send_bytes(self._message)
                self._message = None
            self._connection.send((number, name))
            answer = self._connection.recv()
        except Exception as error:  # the connection, or a class in the answer
            answer = type(error).__name__
        if not isinstance(answer, str):
            return answer
        log_message(f"note: the second process of the proof ended ({answer}); this process checks its properties")
        return None

    def close(self) -> None:
        """Stop the process."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()


def run(connection: Any) -> None:
    """Answer the requests of a `HelperProcess`, until it ends this process."""
    from axlearn_core.compose.devices import configure_devices
    from axlearn_core.plugins.targets import find_machine
    from axlearn_plugins_verify.prove.checks import check_property
    from axlearn_plugins_verify.prove.proof import properties

    configure_devices(find_machine(f"cpu-{DEVICES}"))
    config, original, meshes, target, (seed, *others) = pickle.loads(connection.recv_bytes())
    case = Case(config, original=original, meshes=meshes, seed=seed, target=target)
    cases, chosen = [case, *(case.with_seed(other) for other in others)], properties()
    while True:
        number, name = connection.recv()
        connection.send(check_property(name, chosen[name], cases[number]))


if __name__ == "__main__":
    with multiprocessing.connection.Connection(int(sys.argv[1])) as connection:
        try:
            run(connection)
        except (EOFError, KeyboardInterrupt):
            pass
        except Exception as error:  # the parent checks the properties
            with contextlib.suppress(OSError):
                connection.send(f"{type(error).__name__}: {error}")
