"""Limits on requests and clients: sizes, timeouts, API keys and host names."""

import asyncio
import hmac
import ipaddress
import json

import attrs
import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.memory_return import LARGE, Budget, MemoryReturn
from axlearn_plugins_serving.server.request_record import REQUEST_ID, new_request_id

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/openapi.json"})
"""Paths that do not require an API key."""
_LINGER_SECONDS = 2.0  # seconds for a client to read an error before its unread data resets the connection


@attrs.frozen(kw_only=True)
class ServerLimits:
    """Limits on requests and connections, and rules for who may send requests.

    Attributes:
        body_bytes: Maximum size of a request body.
        body_seconds: Timeout for a request body to arrive.
        large_bytes: Maximum total size of large bodies (64 KiB or more) whose responses have not started. Other large bodies wait.
        head_bytes: Maximum size of the request line and headers.
        headers: Maximum number of headers.
        head_seconds: Timeout for the request line and headers to arrive.
        write_seconds: Timeout for a client to read what was sent.
        keep_alive_seconds: Interval between the comments that a stream sends while it has no event to send.
        connections: Maximum number of open connections.
        api_keys: API keys, one of which clients must send; if empty, no key is required.
        hosts: Allowed values of the `Host` header; None allows any.
        origins: Origins of the web pages that may use the server, such as `https://chat.example`; `*` allows any.
        root_path: Prefix that a proxy puts before the paths, such as `/llm`. Requests may have it or not.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    large_bytes: int = 64 * 2**20
    head_bytes: int = 32 * 1024
    headers: int = 128
    head_seconds: float = 10.0
    write_seconds: float = 30.0
    keep_alive_seconds: float = 10.0
    connections: int = 4096
    api_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()
    root_path: str = ""


def allowed_hosts(host: str, *, has_key: bool) -> frozenset[str] | None:
    """Return the allowed host names.

    The restriction protects a loopback server without a key from web pages that use DNS rebinding.
    """
    if has_key or not is_loopback(host):
        return None
    return frozenset({"localhost", "127.0.0.1", "[::1]", host if ":" not in host else f"[{host}]"})


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LimitRequests:
    """ASGI middleware that checks headers, host, API key, body size and body arrival time."""

    def __init__(self, app: ASGIApp, limits: ServerLimits):
        self._app, self._limits = app, limits
        self._large, self._memory = Budget(limits.large_bytes), MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, read its body and call the app. Raises `ApiError` if a limit is exceeded."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = _BudgetShare(self._large)
        try:
            headers = Headers(scope=scope)
            self._check_head(scope)
            self._check_host(headers)
            self._check_key(headers, scope["path"])
            body = await self._read(headers, receive, share)
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

    def _check_head(self, scope: Scope) -> None:
        """Check a head that arrived in one piece. The protocol checks only heads that are incomplete."""
        headers = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        if size > self._limits.head_bytes:
            raise large_head_error(self._limits)
        if len(headers) > self._limits.headers:
            raise ApiError(
                431,
                f"the request has {len(headers)} headers; send at most {self._limits.headers}",
                code="too_many_headers",
                headers={"connection": "close"},
            )

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
        keys = self._limits.api_keys
        if not keys or path in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else scheme]
        equal = [  # with all, so that the time tells nothing
            hmac.compare_digest(key_sent.encode(), key.encode()) for key_sent in sent for key in keys
        ]
        if not any(equal):
            raise ApiError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
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


class _LimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a connection limit and timeouts."""

    limits: ServerLimits
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.write(_bare_response(_TOO_MANY_CONNECTIONS, "Service Unavailable"))
            transport.close()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._reading = _cancel(self._reading)

    def send_400_response(self, msg: str) -> None:
        unread, _ = self.conn.trailing_data
        if self.conn.their_state is h11.ERROR and len(unread) > self.limits.head_bytes:
            self._refuse(_bare_response(large_head_error(self.limits), "Request Header Fields Too Large"))
        else:
            error = ApiError(400, "not an HTTP request", code="invalid_http")
            self._refuse(_bare_response(error, "Bad Request"))

    def _refuse(self, response: bytes) -> None:
        """Send a response, and ignore what the client sends until it closes the connection or time is up."""
        self._refused = True
        self.transport.write(response)
        self.transport.write_eof()
        self._reading = _cancel(self._reading)
        self._reading = self.loop.call_later(_LINGER_SECONDS, self._abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_seconds, self._abort)

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
            self._reading = self.loop.call_later(self.limits.head_seconds, self._abort)

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def limited_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with a connection limit and timeouts."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def large_head_error(limits: ServerLimits) -> ApiError:
    """Return the error for a request line and headers that are too large."""
    return ApiError(
        431,
        f"the request line and headers are larger than {limits.head_bytes} bytes",
        code="head_too_large",
        headers={"connection": "close"},
    )


def _bare_response(error: ApiError, phrase: str) -> bytes:
    """Encode an error response that does not go through the application."""
    body = json.dumps(error.body).encode()
    head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + f"{REQUEST_ID}: {new_request_id()}\r\nconnection: close\r\n\r\n".encode() + body


_TOO_MANY_CONNECTIONS = ApiError(503, "too many connections", code="too_many_connections")


def uvicorn_config(app: ASGIApp, limits: ServerLimits) -> uvicorn.Config:
    """Return uvicorn's config.

    With this config, uvicorn logs only warnings and errors. `RecordRequests` logs requests.
    """
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_graceful_shutdown=None,
    )
