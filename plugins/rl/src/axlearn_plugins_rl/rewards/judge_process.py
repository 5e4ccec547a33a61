"""Processes that call code of users and libraries, with a time limit.

Code that judges answers may never return, or end its process. `concurrent.futures` cannot end one call, and `multiprocessing`
runs the user's script again in each new process.
"""

import atexit
import ctypes
import functools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

START_SECONDS = 120.0
"""Time limit to start a process and to call a factory, which may import large libraries."""

Judge = Callable[..., Any]
"""Function that runs in a worker process."""


class JudgeFailed(Exception):
    """A judge raised an error, took too long, or ended its process. The message says which."""


def pack_judge(factory: Callable[[], Judge], cls: type) -> bytes:
    """Serialize a function that creates a judge, for `JudgePool.submit_all`.

    Args:
        factory: The function.
        cls: Class whose code it runs. If the class comes from a script, a notebook or a module that was never a file, the code
            itself is serialized.

    Raises:
        TypeError: It cannot be serialized, for example because it refers to a lock or an open file.
    """
    module = sys.modules.get(cls.__module__)
    if module is not None and module.__spec__ is None and module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(factory)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise TypeError(str(error)) from None


class JudgePool:
    """Worker processes that start when they are needed. The pool is thread-safe.

    Args:
        workers: Number of processes.
    """

    def __init__(self, workers: int):
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        self._local = threading.local()
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def submit_all(
        self, judge: bytes, calls: Sequence[tuple[Any, ...]], seconds: float
    ) -> "Future[list[Any | JudgeFailed]]":
        """Call a judge several times in one worker process, in order.

        Args:
            judge: The result of `pack_judge`. Each process creates the judge once.
            calls: Arguments of each call.
            seconds: Time limit of each call. The process of a call that takes longer is killed, and another one goes on.

        Returns:
            A future with the result of each call, or the reason why it failed.
        """
        return self._threads.submit(self._call_all, judge, calls, seconds)

    def close(self) -> None:
        """End the processes. Calls that still run fail."""
        while not self._workers.empty():
            self._workers.get().kill()
        self._threads.shutdown(cancel_futures=True)

    def _call_all(self, judge: bytes, calls: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        if "worker" not in vars(self._local):
            self._local.worker = _Worker()
            self._workers.put(self._local.worker)
        return self._local.worker.call_all(judge, calls, seconds)


@functools.cache
def shared_pool(workers: int) -> JudgePool:
    """Return the pool with a number of workers that all rewards of this process share."""
    pool = JudgePool(workers)
    atexit.register(pool.close)
    return pool


class _Worker:
    """The worker process of one thread. If it has ended, the next call starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._judges: dict[bytes, int] = {}

    def call_all(self, judge: bytes, calls: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """Return the result of each call, or a `JudgeFailed`."""
        results: list[Any] = []
        while len(results) < len(calls):
            try:
                number = self._create_judge(judge)
            except JudgeFailed as error:
                return [*results, *[error] * (len(calls) - len(results))]
            try:
                self._send(number, None, calls[len(results) :])
                while len(results) < len(calls):
                    results.append(self._receive(seconds))
            except JudgeFailed as error:  # the process has ended; another one goes on with the next call
                results.append(error)
        return results

    def _create_judge(self, judge: bytes) -> int:
        """Return the number of a judge in the process. Start the process and create the judge if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        if judge not in self._judges:
            number = len(self._judges)
            self._send(number, judge)
            if isinstance(error := self._receive(START_SECONDS), JudgeFailed):
                raise error
            self._judges[judge] = number
        return self._judges[judge]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self.kill()
        self._judges = {}
        ours, theirs = socket.socketpair()
        with theirs:
            # The code must not take the trainer's accelerators, receive its signals, or print to its standard output.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import {__name__} as m; m.main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def _send(self, number: int, judge: bytes | None, calls: Sequence[tuple[Any, ...]] = ()) -> None:
        request = pickle.dumps((number, judge, len(calls), cloudpickle.dumps(calls)))
        try:
            self._connection.send_bytes(request)
        except OSError:
            raise self._ended() from None

    def _receive(self, seconds: float) -> Any:
        """Return the next result, or the error of a judge as a `JudgeFailed`.

        Raises:
            JudgeFailed: There is none within the time limit, or the process has ended.
        """
        try:
            if not self._connection.poll(seconds):
                self.kill()
                raise JudgeFailed(f"took longer than {seconds:g} s")
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None
        try:
            error, value = pickle.loads(answer)
        except Exception as caught:  # an error here would leave the answers of the other calls unread
            return JudgeFailed(f"returned a value that cannot be read: {_describe(caught)}")
        return value if error is None else JudgeFailed(error)

    def _ended(self) -> JudgeFailed:
        assert self._process is not None
        self.kill()
        return JudgeFailed(f"ended its process with the exit code {self._process.returncode}")


def serve_judges(connection: Any) -> None:
    """Answer the requests of a `JudgePool` until it closes the connection. Send one answer per call."""
    judges: dict[int, Judge] = {}
    while True:
        try:
            number, judge, count, calls = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if judge is not None:
            connection.send_bytes(_answer(_create, judges, number, judge))
            continue
        try:
            calls = pickle.loads(calls)
        except Exception as error:  # a module that is missing here, for example
            for _ in range(count):
                connection.send_bytes(pickle.dumps((_describe(error), None)))
            continue
        for arguments in calls:
            connection.send_bytes(_answer(judges[number], *arguments))


def _create(judges: dict[int, Judge], number: int, judge: bytes) -> None:
    judges[number] = pickle.loads(judge)()


def _answer(function: Callable[..., Any], *arguments: Any) -> bytes:
    try:
        return pickle.dumps((None, function(*arguments)))
    except (Exception, SystemExit) as error:  # the code may raise anything
        return pickle.dumps((_describe(error), None))


def _describe(error: BaseException) -> str:
    """Return the type, the message and the line of an error."""
    folder = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != folder]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def main() -> None:
    """Run a worker process. The last argument of the command is the file descriptor of its connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the trainer, even within a call
    serve_judges(Connection(int(sys.argv[-1])))
