"""Runs the server until it is told to stop: signals, draining, exit codes."""

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server.app import create_app
from axlearn_plugins_serving.server.engine_thread import EngineFailedError
from axlearn_plugins_serving.server.limits import Limits, uvicorn_config
from axlearn_plugins_serving.server.service import Service

_LAST_WORDS = 2.0  # seconds for clients to read that their request was ended


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        RequestError: the port is in use, or the address is not of this machine.
    """
    try:
        infos = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, number, _, address = infos[0]
        listener = socket.socket(
            family, kind, number
        )  # asyncio sets TCP_NODELAY only where the protocol's number is given
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
        fix = "stop what listens there, or choose another with --port" if in_use else "set --host and --port"
        raise RequestError(f"cannot listen on {host}:{port}: {reason}\n    fix: {fix}") from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn, with signals that drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `Runner` has its own


class Runner:
    """One server on one socket.

    Attributes:
        service: what is served; its `state` says whether requests are taken.
    """

    def __init__(self, service: Service, limits: Limits, *, grace: float = 30.0, log_requests: bool = False):
        self.service, self._grace = service, grace
        self._server = _Server(uvicorn_config(create_app(service, limits), limits, log_requests=log_requests))
        self._draining: asyncio.Task[None] | None = None
        self._aborted = 0

    async def run(self, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> int:
        """Serves until `stop`, a signal, or a failure of the engine.

        Args:
            listener: from `bind`.
            ready: called when requests are taken.

        Returns:
            The exit code: 0, or 1 where requests were ended or the engine failed.
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
        """Takes no new requests, finishes those that run, then ends; a second call does not wait for them."""
        if self._draining is None:
            if self.service.state == "ok":
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
            print(f"ended {self._aborted} requests that still ran after the grace time", file=sys.stderr)
            self.service.thread.abort_all(EngineFailedError("the server stops"))
        deadline = loop.time() + _LAST_WORDS
        while self._server.server_state.tasks and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._server.force_exit = True  # connections that nobody reads do not hold the process
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
