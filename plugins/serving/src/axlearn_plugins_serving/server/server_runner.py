"""The life cycle of a server: signals, draining and exit codes."""

import asyncio
import contextlib
import errno
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from axlearn_core.errors import RequestError, counted
from axlearn_plugins_serving.server.app import create_app
from axlearn_plugins_serving.server.engine_thread import EngineStoppingError
from axlearn_plugins_serving.server.limits import ServerLimits, uvicorn_config
from axlearn_plugins_serving.server.server_log import log
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_serving.server.tracing import Tracer

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


def bind_unix(path: str | Path) -> socket.socket:
    """Open a listening Unix socket.

    The process's umask sets who may connect, usually only its user. A socket that a killed server left is replaced.

    Raises:
        RequestError: If the path is in use, is not a socket, or cannot be created.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise RequestError(f"--uds {path}: the file exists and is not a socket\n    fix: choose another path")
        if _accepts_connections(path):
            raise RequestError(f"--uds {path}: a server listens on it\n    fix: stop it, or choose another path")
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise RequestError(
            f"cannot listen on {path}: {error.strerror or error}\n"
            "    fix: choose a path of at most 107 bytes in a directory that this user can write to"
        ) from None
    return listener


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


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

    def __init__(self, service: Service, limits: ServerLimits, *, grace: float = 30.0, tracer: Tracer | None = None):
        self.service, self._grace, self._tracer = service, grace, tracer
        self._server = _Server(uvicorn_config(create_app(service, limits, tracer), limits))
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
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        return 1 if self._aborted or self.service.thread.failure is not None else 0

    def stop(self) -> None:
        """Answer new requests with 503, finish running ones, then stop.

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
        while self.service.thread.active and loop.time() - began < self._grace:
            await asyncio.sleep(0.02)
        self._aborted = self.service.thread.active
        if self._aborted:
            log.warning("aborted %s still running after the grace period", counted(self._aborted, "request"))
            self.service.thread.abort_all(EngineStoppingError())
        self._server.should_exit = True  # until now, the server answered new requests with 503
        deadline = loop.time() + _ERROR_READ_SECONDS
        while self._server.server_state.tasks and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._server.force_exit = True  # do not wait for clients that do not read
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await self.service.thread.stop()

    def _fail(self) -> None:
        self.service.state = "failed"
        log.error("error: the engine has failed: %r", self.service.thread.failure)
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
