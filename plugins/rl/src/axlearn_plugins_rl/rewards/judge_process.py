"""Processes that call code of users and libraries, with a time limit.

Code that judges answers may never return, or end its process. `concurrent.futures` cannot end one call, and `multiprocessing`
runs the user's script again in each new process.
"""

import atexit
import ctypes
import functools
import itertools
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import attrs
import cloudpickle

START_SECONDS = 120.0
"""Time limit to start a process and to call a factory, which may import large libraries."""

FLUSH_SECONDS = 0.02
"""Time after which a process sends the results that it has. One message for each result takes longer than most judges."""
_PROGRESS_BYTES = mmap.PAGESIZE

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


@attrs.frozen(eq=False)
class _Job:
    """Calls of one `JudgePool.submit_all`."""

    judge: bytes
    calls: Sequence[tuple[Any, ...]]
    seconds: float
    future: "Future[list[Any | JudgeFailed]]" = attrs.field(factory=Future)


class JudgePool:
    """Worker processes that start when they are needed. The pool is thread-safe.

    Jobs that wait for the same judge are sent to a process together, because a message takes longer than most judges.

    Args:
        workers: Number of processes.
    """

    def __init__(self, workers: int):
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        self._count = workers
        self._local = threading.local()
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()

    def submit_all(
        self, judge: bytes, calls: Sequence[tuple[Any, ...]], seconds: float
    ) -> "Future[list[Any | JudgeFailed]]":
        """Call a judge several times in one worker process, in order.

        If a call ends its process or takes too long, calls before it may be repeated in the next process.

        Args:
            judge: The result of `pack_judge`. Each process creates the judge once.
            calls: Arguments of each call.
            seconds: Time limit of each call. The process of a call that takes longer is killed, and another one goes on.

        Returns:
            A future with the result of each call, or the reason why it failed.
        """
        job = _Job(judge, calls, seconds)
        with self._lock:
            self._waiting.append(job)
        self._threads.submit(self._run_jobs)
        return job.future

    def close(self) -> None:
        """End the processes. Calls that still run fail, and jobs that wait are cancelled."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            job.future.cancel()
        while not self._workers.empty():
            self._workers.get().kill()
        self._threads.shutdown(cancel_futures=True)

    def _run_jobs(self) -> None:
        """Run one worker's share of the jobs that wait for the same judge, unless another call has run all of them."""
        jobs = [job for job in self._take_jobs() if job.future.set_running_or_notify_cancel()]
        if not jobs:
            return
        try:
            if "worker" not in vars(self._local):
                self._local.worker = _Worker()
                self._workers.put(self._local.worker)
            results = self._local.worker.call_all(jobs[0].judge, [job.calls for job in jobs], jobs[0].seconds)
            for job, result in zip(jobs, results, strict=True):
                job.future.set_result(result)
        except BaseException as error:
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)

    def _take_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        with self._lock:
            limit = -(-len(self._waiting) // self._count)
            others: deque[_Job] = deque()
            for job in self._waiting:
                is_alike = not jobs or (job.judge, job.seconds) == (jobs[0].judge, jobs[0].seconds)
                (jobs if is_alike and len(jobs) < limit else others).append(job)
            self._waiting = others
        return jobs


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
        self._progress = memoryview(bytearray(_PROGRESS_BYTES)).cast("Q")

    def call_all(self, judge: bytes, jobs: Sequence[Sequence[tuple[Any, ...]]], seconds: float) -> list[list[Any]]:
        """Return a result or a `JudgeFailed` for each call of each job."""
        results: list[list[Any]] = [[None] * len(calls) for calls in jobs]
        missing = [(job, call) for job, calls in enumerate(jobs) for call in range(len(calls))]
        while missing:
            try:
                number = self._create_judge(judge)
            except JudgeFailed as error:
                for job, call in missing:
                    results[job][call] = error
                return results
            count = 0
            try:
                self._send_calls(number, jobs, missing)
                while count < len(missing):
                    for answer in self._receive(seconds):
                        job, call = missing[count]
                        results[job][call] = answer
                        count += 1
                missing = []
            except JudgeFailed as error:  # the process has ended; another one goes on with the other calls
                job, call = missing.pop(max(count, min(self._progress[0], len(missing) - 1)))
                results[job][call] = error
                del missing[:count]
        return results

    def _create_judge(self, judge: bytes) -> int:
        """Return the number of a judge in the process. Start the process and create the judge if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        if judge not in self._judges:
            number = len(self._judges)
            self._send(number, judge)
            (answer,) = self._receive(START_SECONDS)
            if isinstance(answer, JudgeFailed):
                raise answer
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
        with theirs, tempfile.TemporaryFile() as file:
            file.write(bytes(_PROGRESS_BYTES))
            file.flush()
            self._progress = map_progress(file.fileno())
            # The code must not take the trainer's accelerators, receive its signals, or print to its standard output.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"import {__name__} as m; m.main()",
                    str(theirs.fileno()),
                    str(file.fileno()),
                ],
                pass_fds=[theirs.fileno(), file.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def _send_calls(self, number: int, jobs: Sequence[Sequence[Any]], missing: Sequence[tuple[int, int]]) -> None:
        """Send calls, those of each job in a pickle of its own, so that one that cannot be read fails alone."""
        self._progress[0] = 0
        groups = itertools.groupby(missing, key=lambda place: place[0])
        parts = [[jobs[job][call] for _, call in places] for job, places in groups]
        self._send(number, None, [(len(part), cloudpickle.dumps(part)) for part in parts])

    def _send(self, number: int, judge: bytes | None, parts: Sequence[tuple[int, bytes]] = ()) -> None:
        try:
            self._connection.send_bytes(pickle.dumps((number, judge, parts)))
        except OSError:
            raise self._ended() from None

    def _receive(self, seconds: float) -> list[Any]:
        """Return the next results. The error of a judge is a `JudgeFailed`.

        Raises:
            JudgeFailed: There are none within the time limit, or the process has ended.
        """
        try:
            if not self._connection.poll(seconds + FLUSH_SECONDS):
                self.kill()
                raise JudgeFailed(f"took longer than {seconds:g} s")
            answers = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        return [_read_answer(answer) for answer in answers]

    def _ended(self) -> JudgeFailed:
        assert self._process is not None
        self.kill()
        return JudgeFailed(f"ended its process with the exit code {self._process.returncode}")


def _read_answer(answer: bytes) -> Any:
    """Return the result of a call, or a `JudgeFailed`."""
    try:
        error, value = pickle.loads(answer)
    except Exception as caught:  # an error here would leave the answers of the other calls unread
        return JudgeFailed(f"returned a value that cannot be read: {_describe(caught)}")
    return value if error is None else JudgeFailed(error)


def map_progress(file: int) -> "memoryview[int]":
    """Return the number of the call that a process has begun, in memory that it shares with the trainer.

    Args:
        file: Descriptor of a file of `_PROGRESS_BYTES` bytes.
    """
    return memoryview(mmap.mmap(file, _PROGRESS_BYTES)).cast("Q")


def serve_judges(connection: Any, progress: "memoryview[int]") -> None:
    """Answer the requests of a `JudgePool` until it closes the connection.

    Args:
        connection: Connection to the pool.
        progress: Receives the number of each call of a request before it begins.
    """
    judges: dict[int, Judge] = {}
    while True:
        try:
            number, judge, parts = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if judge is not None:
            connection.send_bytes(pickle.dumps([_answer(_create, judges, number, judge)]))
            continue
        answers: list[bytes] = []
        sent, flushed = 0, time.monotonic()
        for answer in _answers(judges[number], parts, progress):
            answers.append(answer)
            if time.monotonic() - flushed > FLUSH_SECONDS:
                connection.send_bytes(pickle.dumps(answers[sent:]))
                sent, flushed = len(answers), time.monotonic()
        if sent < len(answers):
            connection.send_bytes(pickle.dumps(answers[sent:]))


def _answers(judge: Judge, parts: Sequence[tuple[int, bytes]], progress: "memoryview[int]") -> Iterator[bytes]:
    """Yield the answer to each call."""
    begun = 0
    for count, pickled in parts:
        progress[0] = begun
        try:
            calls = pickle.loads(pickled)
        except Exception as error:  # a module that is missing here, for example
            yield from [pickle.dumps((_describe(error), None))] * count
            begun += count
            continue
        for arguments in calls:
            progress[0] = begun
            yield _answer(judge, *arguments)
            begun += 1


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
    """Run a worker process. The arguments of the command are the file descriptors of its connection and of its progress."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the trainer, even within a call
    serve_judges(Connection(int(sys.argv[-2])), map_progress(int(sys.argv[-1])))
