"""The life cycle of a server: signals, draining and exit codes."""

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from axlearn_core.errors import RequestError, counted
from axlearn_plugins_serving.server.app import create_app
from axlearn_plugins_serving.server.engine_thread import EngineStoppingError
from axlearn_plugins_serving.server.limits import ServerLimits, uvicorn_config
from axlearn_plugins_serving.server.service import Service

_ERROR_READ_SECONDS = 2.0  # seconds for clients to read the error response


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Port 0 picks a free port.

    Raises:
        RequestError: If the port is in use or the address is not on this machine.
    """
    try:
        infos = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, number, _, address = infos[0]
        listener = socket.socket(family, kind, number)  # asyncio sets TCP_NODELAY only if the protocol number is given
    except (OSError, OverflowError, UnicodeError) as error:
        raise RequestError(f"cannot listen on {host}:{port}: {error}\n    fix: set --host and --port") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if in_use else f"{error.strerror}"
        fix = "stop the other process, or choose another port with --port" if in_use else "set --host and --port"
        raise RequestError(f"cannot listen on {host}:{port}: {reason}\n    fix: {fix}") from None
    return listener


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `ServerRunner`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `ServerRunner` handles signals


class ServerRunner:
    """A server on a socket.

    Attributes:
        service: The served model. Its `state` tells whether the server accepts requests.
    """

    def __init__(self, service: Service, limits: ServerLimits, *, grace: float = 30.0, log_requests: bool = False):
        self.service, self._grace = service, grace
        self._server = _Server(uvicorn_config(create_app(service, limits), limits, log_requests=log_requests))
        self._draining: asyncio.Task[None] | None = None
        self._aborted = 0

    async def run(self, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> int:
        """Serve until `stop` is called, a signal arrives, or the engine fails.

        Args:
            listener: Socket from `bind`.
            ready: Called when the server accepts requests.

        Returns:
            The exit code: 0, or 1 if requests were aborted or the engine failed.
        """
        self.service.thread.on_failure = self._fail
        self.service.thread.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        with self._signals():
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            if not serving.done():
                ready()
            await serving
        if self._draining is not None:
            await self._draining
        await self.service.thread.stop()
        self.service.text_pool.close()
        self.service.bodies.close()
        return 1 if self._aborted or self.service.thread.failure is not None else 0

    def stop(self) -> None:
        """Reject new requests, finish running ones, then stop.

        A second call aborts running requests.
        """
        if self._draining is None:
            if self.service.state in ("ok", "sleeping"):
                self.service.state = "draining"
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._grace = 0.0

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._server.should_exit = True
        while self.service.thread.active and loop.time() - began < self._grace:
            await asyncio.sleep(0.02)
        self._aborted = self.service.thread.active
        if self._aborted:
            print(f"aborted {counted(self._aborted, 'request')} still running after the grace period", file=sys.stderr)
            self.service.thread.abort_all(EngineStoppingError())
        deadline = loop.time() + _ERROR_READ_SECONDS
        while self._server.server_state.tasks and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._server.force_exit = True  # do not wait for clients that do not read
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await self.service.thread.stop()

    def _fail(self) -> None:
        self.service.state = "failed"
        print(f"error: the engine has failed: {self.service.thread.failure!r}", file=sys.stderr)
        self._grace = 0.0
        self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.stop)
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread: the owner calls `stop`
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
