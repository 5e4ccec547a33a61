"""The thread that runs an engine, and the queues between it and asyncio."""

import asyncio
import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Engine, Output, QueueFullError, Request, Statistics
from axlearn_plugins_serving.engine_capabilities import PacesSteps

T = TypeVar("T")

_SAMPLE_SECONDS = 0.2
_IDLE_SECONDS = 0.001  # between steps without outputs
_log = logging.getLogger("axlearn.serving")


class EngineFailedError(Exception):
    """Raised if the engine has failed."""


class EngineStoppingError(EngineFailedError):
    """Raised if the engine is stopping with the server."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class SlowReaderError(Exception):
    """Raised if a client reads too slowly and its buffer is full."""


class Outputs:
    """The outputs of requests that were added together, in order of arrival.

    Attributes:
        ids: Ids of the requests.
    """

    def __init__(self, ids: Sequence[str], limit: float):
        self.ids = tuple(ids)
        self._limit, self._waiting = limit, 0
        self._queue: collections.deque[Output] = collections.deque()
        self._event = asyncio.Event()
        self._error: Exception | None = None

    async def get(self) -> list[Output]:
        """Wait for at least one output, and return all outputs since the last call.

        Raises:
            EngineFailedError: If the engine has failed.
            EngineStoppingError: If it is stopping with the server.
            SlowReaderError: If too many tokens were waiting for this call.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        self._event.clear()
        outputs, self._waiting = list(self._queue), 0
        self._queue.clear()
        return outputs

    def put(self, output: Output) -> bool:
        """Add an output. Returns False if too many tokens are waiting."""
        self._waiting += len(output.tokens)
        if self._waiting > self._limit:
            self.fail(SlowReaderError(f"{self._limit} tokens are waiting to be read"))
            return False
        self._queue.append(output)
        self._event.set()
        return True

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error`."""
        self._queue.clear()
        self._error = error
        self._event.set()


class EngineThread:
    """A thread that runs an engine.

    Call all methods from the event loop's thread.

    Attributes:
        statistics: Statistics of the engine, updated after steps, at most every 0.2 s.
        failure: The error that ended the thread; None while it runs.
    """

    def __init__(self, engine: Engine, *, max_commands: int = 4096, max_waiting_tokens: int = 8192):
        self.engine = engine
        self.statistics: Statistics = engine.statistics()
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self._max_commands, self._max_waiting_tokens = max_commands, max_waiting_tokens
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._receivers: dict[str, Outputs] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def active(self) -> int:
        """The number of unfinished requests."""
        return len(self._receivers)

    def start(self) -> None:
        """Start the thread. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread and close the engine. Running requests fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._fail_all(EngineStoppingError())

    async def add(self, requests: Sequence[Request], *, bounded: bool = True) -> Outputs:
        """Add all requests, or none.

        Args:
            requests: Requests with unique ids.
            bounded: Whether a client reads the outputs as they arrive. If so, requests are aborted when their client is too slow.

        Raises:
            RequestError: If the engine rejects a request.
            QueueFullError: If the queue is full.
            EngineFailedError: If the engine has failed.
            EngineStoppingError: If it is stopping with the server.
        """
        if self.failure is not None:
            raise EngineFailedError("the engine has failed")
        if self._stopping:
            raise EngineStoppingError
        if len(self._commands) >= self._max_commands:
            raise QueueFullError(f"{self._max_commands} requests are waiting to be queued", 1.0)
        assert self._loop is not None
        limit = self._max_waiting_tokens * len(requests) if bounded else math.inf
        outputs = Outputs([request.id for request in requests], limit)
        for request in requests:
            self._receivers[request.id] = outputs
        added: asyncio.Future[None] = self._loop.create_future()
        self._command(lambda: self._add(requests, added))
        try:
            await asyncio.shield(added)
        except BaseException:
            added.add_done_callback(lambda future: future.cancelled() or future.exception())  # avoid asyncio's warning
            self.abort(outputs.ids)
            raise
        return outputs

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps, and return its result.

        Raises:
            EngineFailedError: If the engine has failed or is stopping.
        """
        if self.failure is not None or self._stopping:
            raise EngineFailedError("the engine has failed") if self.failure is not None else EngineStoppingError()
        assert self._loop is not None
        result: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = function()
            except Exception as error:  # an operation that fails must not end the thread
                self._call_loop(self._set, result, error)
            else:
                self._call_loop(self._set, result, None, value)

        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._command(run)
        return await asyncio.shield(result)

    def abort(self, ids: Sequence[str]) -> None:
        """Abort requests that have not ended."""
        running = [id for id in ids if self._receivers.pop(id, None) is not None]
        if running and self.failure is None:
            self._command(lambda: [self.engine.abort(id) for id in running])

    def abort_all(self, error: Exception) -> None:
        """Abort all requests. `error` is raised where their outputs are awaited."""
        for outputs in set(self._receivers.values()):
            self.abort(outputs.ids)
            outputs.fail(error)

    def _command(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._commands.append(command)  # type: ignore[arg-type]
            self._wake.notify()

    # Called in the event loop, on behalf of the thread.

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            receiver = self._receivers.get(output.id)
            if receiver is None:  # already aborted
                continue
            if output.finish is not None:
                del self._receivers[output.id]
            if not receiver.put(output):
                self.abort(receiver.ids)

    def _fail(self, failure: BaseException) -> None:
        self.failure = failure
        self._fail_all(EngineFailedError("the engine has failed"))
        if self.on_failure is not None:
            self.on_failure()

    def _fail_all(self, error: Exception) -> None:
        receivers = set(self._receivers.values())
        self._receivers.clear()
        for outputs in receivers:
            outputs.fail(error)
        for call in list(self._calls):
            self._set(call, error)

    def _set(self, future: "asyncio.Future[Any]", error: Exception | None, value: Any = None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    # Called in the thread.

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _add(self, requests: Sequence[Request], added: "asyncio.Future[None]") -> None:
        error: Exception | None = None
        for i, request in enumerate(requests):
            try:
                self.engine.add(request)
            except RequestError as refusal:
                error = refusal
                for other in requests[:i]:
                    self.engine.abort(other.id)
                break
        self._call_loop(self._set, added, error)

    def _wait_for_more(self) -> bool:
        """Wait for more requests until the next step must be planned.

        Returns True if commands arrived or the thread is stopping.
        """
        seconds = self.engine.spare_seconds() if isinstance(self.engine, PacesSteps) else 0.0
        if seconds <= 0:
            return False
        with self._wake:
            return self._stopping or self._wake.wait_for(lambda: bool(self._commands or self._stopping), seconds)

    def _run(self) -> None:
        sampled = 0.0
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self.engine.busy()):
                        self.statistics = self.engine.statistics()
                        self._wake.wait()
                    commands = [self._commands.popleft() for _ in range(len(self._commands))]
                if self._stopping:
                    break
                for command in commands:
                    command()
                if not self.engine.busy() or self._wait_for_more():
                    continue
                outputs = self.engine.step()
                if outputs:
                    self._call_loop(self._deliver, outputs)
                elif not self._commands:
                    time.sleep(_IDLE_SECONDS)
                if time.monotonic() - sampled > _SAMPLE_SECONDS:
                    self.statistics, sampled = self.engine.statistics(), time.monotonic()
        except BaseException as failure:
            _log.exception("the engine has failed")
            self._call_loop(self._fail, failure)
        finally:
            try:
                self.statistics = self.engine.statistics()
                self.engine.close()
            except Exception:
                _log.exception("the engine could not be closed")
