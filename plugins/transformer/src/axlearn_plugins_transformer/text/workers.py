"""A stream that one worker process prepares.

A worker that dies or exceeds the time limit is restarted.
"""

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
"""Maximum number of consecutive restarts without a batch."""
CLOSE_SECONDS = 5.0

MakeStream = Callable[[str], Any]
"""Creates Grain's iterator over a worker process, which writes its process id to the given file."""


class WorkerStream:
    """Grain's iterator over a worker process; see `grain.DatasetIterator` for its methods.

    The stream saves the position after the last returned batch, so that a new worker continues with the next batch.

    Args:
        make: Creates the iterator.
        shards: Shards that the worker reads, for messages.
        seconds: Time limit for a batch.
    """

    def __init__(self, make: MakeStream, shards: Sequence[int], seconds: float):
        self._make, self._shards, self._seconds = make, list(shards), seconds
        self._folder = tempfile.TemporaryDirectory(prefix="axlearn-worker-")
        self._failures = 0
        self._state: Any = None
        self._start()

    def ask(self) -> None:
        """Request the next batch from the worker, unless it has already been requested.

        Does not wait for the batch.
        """
        if not self._requested:
            self._requested = True
            self._calls.put(None)

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            InputError: No worker returns a batch. The message names the worker and the failure.
        """
        while True:
            self.ask()
            try:
                batch, error = self._results.get(timeout=self._seconds)
            except queue.Empty:
                problem = f"did not return a batch within {self._seconds:g} s"
            except BaseException:  # interrupted while waiting, so the result of the request would be stale
                self._abandon()
                raise
            else:
                self._requested = False
                if error is None:
                    self._failures, self._state = 0, self._stream.get_state()
                    return batch
                if not _is_process_death(error):
                    raise error
                problem = "was killed or crashed"
            self._recover(problem)

    def get_state(self) -> Any:
        """Return the position after the last returned batch."""
        return self._stream.get_state() if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        if self._requested:  # a batch from the old position is pending
            self._abandon()
            self._start()
        self._stream.set_state(state)
        self._state = state

    def close(self) -> None:
        """Stop the worker."""
        self._calls.put(False)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # the thread is waiting for a worker that hangs
            self._kill()
            self._thread.join(CLOSE_SECONDS)
        self._folder.cleanup()

    def _recover(self, problem: str) -> None:
        self._failures += 1
        problem_text = f"the data worker of {self._name()} {problem}"
        self._abandon()
        if self._failures > RESTARTS:
            raise InputError(
                f"{problem_text}; {RESTARTS} replacements failed too\n"
                "    fix: check the memory and the storage of this machine; input.workers=0 reads in this process; "
                "input.worker_seconds sets the time limit"
            )
        print(f"{problem_text}; a new worker continues with the same batch", file=sys.stderr, flush=True)
        self._restart()

    def _restart(self) -> None:
        self._start()
        if self._state is not None:
            self._stream.set_state(self._state)

    def _start(self) -> None:
        self._pid_file = Path(self._folder.name, os.urandom(8).hex())
        self._stream, self._requested = self._make(str(self._pid_file)), False
        # A read from a worker that stopped in the middle of a message cannot be interrupted, so a thread does it.
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
        except (OSError, ValueError):  # not started yet
            return None

    def _name(self) -> str:
        listing = ", ".join(map(str, self._shards[:8])) + (", ..." if len(self._shards) > 8 else "")
        pid = self._pid()
        return f"shards {listing} ({f'process {pid}' if pid is not None else 'not started yet'})"


def _serve(stream: Any, calls: Any, results: Any) -> None:
    """Read one batch for each None in `calls`. Close the stream on any other value."""
    while calls.get() is None:
        try:
            results.put((next(stream), None))
        except BaseException as error:  # `__next__` raises it
            results.put((None, error))
    stream.close()


def _is_process_death(error: BaseException) -> bool:
    """Return whether Grain reports the death of a worker process."""
    return isinstance(error, RuntimeError) and "terminated unexpectedly" in str(error)
