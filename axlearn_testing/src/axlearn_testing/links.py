"""Faulty connections between a job and its services: a TCP link, an HTTP server and a storage backend."""

import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.contracts.storage import Storage, StoredFile
from axlearn_core.errors import StorageError


class TcpLink:
    """Forwards TCP connections from a port on 127.0.0.1 to an address, and can cut them. Use it as a context manager.

    Attributes:
        port: Local port to connect to.
    """

    def __init__(self, host: str, port: int):
        self.target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_down = False
        threading.Thread(target=self._accept, name="tcp-link", daemon=True).start()

    def cut(self) -> None:
        """Reset every connection, and close new ones immediately."""
        with self._lock:
            self._is_down = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def mend(self) -> None:
        """Accept new connections again."""
        self._is_down = False

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Cut the link within the context."""
        self.cut()
        try:
            yield
        finally:
            self.mend()

    def __enter__(self) -> "TcpLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._is_down:
                client.close()
                continue
            try:
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with self._lock:
                if end in self._open:
                    self._open.discard(end)
        with contextlib.suppress(OSError):
            source.close()


class HttpFaults:
    """WSGI middleware that makes some requests fail and others hang until the client times out.

    Attributes:
        failing: Fraction of requests that are answered with 503. Half of these requests are processed first.
        hanging: Fraction of requests that are processed, but answered after the client's timeout.
        seconds: Delay of hanging requests.
        counts: Number of `good`, `503` and `late` responses.
        observe: Function that is called with the environment of each request.
    """

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        *,
        seed: int = 0,
        failing: float = 0.0,
        hanging: float = 0.0,
        seconds: float = 0.0,
    ):
        self.app, self.failing, self.hanging, self.seconds = app, failing, hanging, seconds
        self.dice, self.counts = random.Random(seed), {"good": 0, "503": 0, "late": 0}
        self.observe: Callable[[Any], None] | None = None

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        if self.observe is not None:
            self.observe(environ)
        draw = self.dice.random()
        if draw < self.failing / 2:
            return self._refuse(start_response)
        if draw >= self.failing + self.hanging:
            self.counts["good"] += 1
            return self.app(environ, start_response)
        for _ in self.app(environ, lambda *_: None):  # process the request without telling the client
            pass
        if draw >= self.failing:
            self.counts["late"] += 1
            time.sleep(self.seconds)
        return self._refuse(start_response)

    def _refuse(self, start_response: Any) -> list[bytes]:
        self.counts["503"] += 1
        body = b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"
        start_response("503 Slow Down", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [body]


class FaultyStorage:
    """Wraps any `Storage` and makes some calls fail; see `axlearn_core.contracts.storage.Storage`.

    Attributes:
        failing: Fraction of calls that raise `StorageError`.
        full_after: Number of written bytes after which writes fail as on a full disk, or None for no limit.
        seconds: Seconds by which each call is delayed.
        failures: Number of calls that failed.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        seed: int = 0,
        failing: float = 0.0,
        full_after: int | None = None,
        seconds: float = 0.0,
    ):
        self.storage, self.failing, self.full_after, self.seconds = storage, failing, full_after, seconds
        self.failures, self.written = 0, 0
        self._dice, self._lock = random.Random(seed), threading.Lock()

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """List files, or fail."""
        self._fail(prefix)
        return self.storage.list(prefix)

    def list_names(self, folder: str = "") -> Sequence[str]:
        """List the names in a folder, or fail."""
        self._fail(folder)
        return self.storage.list_names(folder)

    def read(self, path: str) -> bytes:
        """Read a file, or fail."""
        self._fail(path)
        return self.storage.read(path)

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Read a range into a buffer, or fail."""
        self._fail(path)
        self.storage.read_into(path, begin, buffer)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file, or fail before or during the write."""
        self._fail(path)
        self.storage.write(path, self._count_bytes(path, chunks))

    def create(self, path: str, data: bytes) -> bool:
        """Create a file, or fail."""
        self._fail(path)
        return self.storage.create(path, data)

    def staging(self, target: str) -> str:
        """Return the storage's staging path. Does not fail."""
        return self.storage.staging(target)

    def commit(self, source: str, target: str) -> None:
        """Commit a staging path, or fail."""
        self._fail(source)
        self.storage.commit(source, target)

    def delete(self, path: str) -> None:
        """Delete a file, or fail."""
        self._fail(path)
        self.storage.delete(path)

    def directory(self) -> Path:
        """Return the storage's directory. Does not inject failures."""
        return self.storage.directory()

    def _count_bytes(self, path: str, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            self.written += len(chunk)
            if self.full_after is not None and self.written > self.full_after:
                self.failures += 1
                raise StorageError(f"{path}: {os.strerror(errno.ENOSPC)}")
            yield chunk

    def _fail(self, path: str) -> None:
        time.sleep(self.seconds)
        with self._lock:
            fails = self._dice.random() < self.failing
            self.failures += fails
        if fails:
            raise StorageError(f"{path}: injected failure")
