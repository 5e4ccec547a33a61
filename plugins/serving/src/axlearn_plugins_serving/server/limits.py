"""Limits on requests and clients: sizes, timeouts, API key and host names."""

import asyncio
import hmac
import ipaddress
import json
import logging

import attrs
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.http import error_response
from axlearn_plugins_serving.server.memory_return import LARGE, Budget, MemoryReturn

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json"})
"""Paths that do not require an API key."""


@attrs.frozen(kw_only=True)
class ServerLimits:
    """Limits on requests and connections, and rules for who may send requests.

    Attributes:
        body_bytes: Maximum size of a request body.
        body_seconds: Timeout for a request body to arrive.
        large_bytes: Maximum total size of large bodies (64 KiB or more) whose responses have not started. Other large bodies wait.
        head_seconds: Timeout for the request line and headers to arrive.
        write_seconds: Timeout for a client to read what was sent.
        connections: Maximum number of open connections.
        api_key: API key that clients must send; None requires no key.
        hosts: Allowed values of the `Host` header; None allows any.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    large_bytes: int = 64 * 2**20
    head_seconds: float = 10.0
    write_seconds: float = 30.0
    connections: int = 4096
    api_key: str | None = attrs.field(default=None, repr=False)
    hosts: frozenset[str] | None = None


def allowed_hosts(host: str, api_key: str | None) -> frozenset[str] | None:
    """Return the allowed host names.

    The restriction protects a loopback server without a key from web pages that use DNS rebinding.
    """
    if api_key is not None or not is_loopback(host):
        return None
    return frozenset({"localhost", "127.0.0.1", "[::1]", host if ":" not in host else f"[{host}]"})


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LimitRequests:
    """ASGI middleware that checks API key, host, body size and body arrival time."""

    def __init__(self, app: ASGIApp, limits: ServerLimits):
        self._app, self._limits = app, limits
        self._large, self._memory = Budget(limits.large_bytes), MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, read its body and call the app.

        Respond with an error if a limit is exceeded.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = _BudgetShare(self._large)
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_key(headers, scope["path"])
            body = await self._read(headers, receive, share)
        except ApiError as error:
            share.end()
            await error_response(error)(scope, receive, send)
            return
        except BaseException:
            share.end()
            raise
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def begin(message: Message) -> None:
            share.end()
            await send(message)

        try:
            await self._app(scope, replay, begin if share.size else send)
        finally:
            share.end()
            self._memory.note(len(body))

    def _check_host(self, headers: Headers) -> None:
        hosts = self._limits.hosts
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if hosts is not None and name.lower() not in hosts:
            raise ApiError(
                421,
                f"this server does not answer to the host {name[:80]!r}; use http://127.0.0.1, or start it with an API key",
                code="wrong_host",
            )

    def _check_key(self, headers: Headers, path: str) -> None:
        key = self._limits.api_key
        if key is None or path in OPEN_PATHS:
            return
        key_sent = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key_sent.encode(), key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, receive: Receive, share: "_BudgetShare") -> bytes:
        limit = self._limits.body_bytes
        length = headers.get("content-length", "")
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds) as timeout:
                while True:
                    if size >= LARGE and not share.size:  # unread data stays with the client
                        timeout.reschedule(None)
                        await share.begin(int(length) if length.isdecimal() else limit)
                        timeout.reschedule(asyncio.get_running_loop().time() + self._limits.body_seconds)
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client left before its request was complete")
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_seconds:g} s",
                code="slow_body",
                headers={"connection": "close"},
            ) from None


class _BudgetShare:
    """A large body's share of the budget."""

    def __init__(self, budget: Budget):
        self._budget, self.size = budget, 0

    async def begin(self, size: int) -> None:
        await self._budget.take(size)
        self.size = size

    def end(self) -> None:
        if self.size:
            self._budget.release(self.size)
            self.size = 0


def limited_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with a connection limit and timeouts."""

    class LimitedProtocol(H11Protocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(_TOO_MANY_CONNECTIONS)
                transport.close()
                return
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            else:
                self._reading = _cancel(self._reading)

        def send_400_response(self, msg: str) -> None:
            self.transport.write(
                _bare_response(ApiError(400, "not an HTTP request", code="invalid_http"), "Bad Request")
            )
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._writing is None:
                self._writing = self.loop.call_later(limits.write_seconds, self._abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._writing = _cancel(self._writing)

        def connection_lost(self, exc: Exception | None) -> None:
            self._reading, self._writing = _cancel(self._reading), _cancel(self._writing)
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            self._reading = _cancel(self._reading)  # from here on, the keep-alive timeout applies
            super().on_response_complete()

        def _await_head(self) -> None:
            if self._reading is None:
                self._reading = self.loop.call_later(limits.head_seconds, self._abort)

        def _abort(self) -> None:
            if self.transport is not None:
                self.transport.abort()

    return LimitedProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _bare_response(error: ApiError, phrase: str) -> bytes:
    body = json.dumps(error.body).encode()
    head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


_TOO_MANY_CONNECTIONS = _bare_response(
    ApiError(503, "too many connections", code="too_many_connections"), "Service Unavailable"
)


def print_access_log() -> None:
    """Write uvicorn's access log to stderr.

    Without a handler and a level, it is discarded.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("uvicorn.access")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def uvicorn_config(app: ASGIApp, limits: ServerLimits, *, log_requests: bool = False) -> uvicorn.Config:
    """Return uvicorn's config.

    With this config, uvicorn logs only errors. If `log_requests` is True, it also logs one line per request to stderr.
    """
    if log_requests:
        print_access_log()
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=log_requests,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=32 * 1024,
        timeout_graceful_shutdown=None,
    )
