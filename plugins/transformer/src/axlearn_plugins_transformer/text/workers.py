"""A stream that one worker process prepares, with a time limit: a worker that dies or stands still is started again."""

import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.errors import InputError

RESTARTS = 3
"""How often in a row, without a batch between, a worker is started again."""
CLOSE_SECONDS = 5.0

MakeStream = Callable[[str], Any]
"""Grain's iterator over one worker process, which writes its process id into the file of this name."""


class WorkerStream:
    """Grain's iterator over a worker process; see `grain.DatasetIterator` for its methods.

    The position after the batch returned last is kept here, so that another worker goes on with the very next batch.

    Args:
        make: makes the iterator.
        shards: what the worker reads, for messages.
        seconds: how long one batch may take.
    """

    def __init__(self, make: MakeStream, shards: Sequence[int], seconds: float):
        self._make, self._shards, self._seconds = make, list(shards), seconds
        self._folder = tempfile.TemporaryDirectory(prefix="axlearn-worker-")
        self._failures = 0
        self._state: Any = None
        self._start()

    def ask(self) -> None:
        """Has the worker begin with the next batch, where it has not; does not wait for it."""
        if not self._asked:
            self._asked = True
            self._calls.put(None)

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            InputError: no worker gives it; names the worker and what became of it.
        """
        while True:
            self.ask()
            try:
                batch, error = self._results.get(timeout=self._seconds)
            except queue.Empty:
                problem = f"gave no batch for {self._seconds:g} s"
            except BaseException:  # the wait was ended: what the worker gives later belongs to nobody
                self._abandon()
                raise
            else:
                self._asked = False
                if error is None:
                    self._failures, self._state = 0, self._stream.get_state()
                    return batch
                if not _is_process_death(error):
                    raise error
                problem = "was killed, or crashed"
            self._recover(problem)

    def get_state(self) -> Any:
        """The position after the batch returned last."""
        return self._stream.get_state() if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` gave."""
        if self._asked:  # a batch of the position before is under way
            self._abandon()
            self._start()
        self._stream.set_state(state)
        self._state = state

    def close(self) -> None:
        """Ends the worker."""
        self._calls.put(False)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # it waits for a worker that stands still
            self._kill()
            self._thread.join(CLOSE_SECONDS)
        self._folder.cleanup()

    def _recover(self, problem: str) -> None:
        self._failures += 1
        problem_text = f"the data worker of {self._name()} {problem}"
        self._abandon()
        if self._failures > RESTARTS:
            raise InputError(
                f"{problem_text}; so did the {RESTARTS} that were started in its place\n"
                "    fix: look at the memory and the storage of this machine; input.workers=0 reads in this process; "
                "input.worker_seconds is the limit"
            )
        print(f"{problem_text}; another one goes on with the same batch", file=sys.stderr, flush=True)
        self._restart()

    def _restart(self) -> None:
        self._start()
        if self._state is not None:
            self._stream.set_state(self._state)

    def _start(self) -> None:
        self._pid_file = Path(self._folder.name, os.urandom(8).hex())
        self._stream, self._asked = self._make(str(self._pid_file)), False
        # Waiting for a worker that stopped in the middle of a message cannot be ended: another thread does it.
        self._calls: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        arguments = (self._stream, self._calls, self._results)
        self._thread = threading.Thread(target=_serve, args=arguments, name="data-worker", daemon=True)
        self._thread.start()

    def _abandon(self) -> None:
        self._kill()
        self._calls.put(False)

    def _kill(self) -> None:
        if (pid := self._pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):  # it has not started yet
            return None

    def _name(self) -> str:
        listing = ", ".join(map(str, self._shards[:8])) + (", ..." if len(self._shards) > 8 else "")
        pid = self._pid()
        return f"shards {listing} ({f'process {pid}' if pid is not None else 'not started yet'})"


def _serve(stream: Any, calls: Any, results: Any) -> None:
    """Takes a batch for each None, until something else comes; then ends the worker."""
    while calls.get() is None:
        try:
            results.put((next(stream), None))
        except BaseException as error:  # raised again where it is waited for
            results.put((None, error))
    stream.close()


def _is_process_death(error: BaseException) -> bool:
    """Whether Grain says that the process of a stream is gone."""
    return isinstance(error, RuntimeError) and "terminated unexpectedly" in str(error)
