"""ASGI middleware around the application: request ids, logs, metrics, traces, and the prefix of a proxy."""

import time
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axlearn_plugins_serving.server.api_errors import draining_error
from axlearn_plugins_serving.server.request_record import REQUEST_ID, RequestRecord, current_request
from axlearn_plugins_serving.server.server_log import log_arrival, log_request
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_serving.server.tracing import Tracer


class RecordRequests:
    """Gives each request an id, and logs, counts and traces it.

    Args:
        app: Application to call.
        service: The served model, with its metrics.
        routes: Routes to count separately.
        tracer: Exports a span for each request; None exports nothing.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[Route], tracer: Tracer | None = None):
        self._app, self._service, self._routes, self._tracer = app, service, routes, tracer
        self._paths = {route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app and record its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.from_scope(scope)
        began = time.monotonic()
        path = self._label(record.path)
        log_arrival(record)

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = record.id
                self._service.metrics.responses.labels(path, record.status).inc()
            await send(message)

        current_request.set(record)  # each request has its own task, so nothing resets it
        try:
            await self._app(scope, receive, begin)
        finally:
            record.seconds = time.monotonic() - began
            log_request(record)
            if self._tracer is not None:
                self._tracer.export(record)

    def _label(self, path: str) -> str:
        """Return the route's path with the names of its parameters, or `other`."""
        if path in self._paths:
            return path
        return next((route.path_format for route in self._routes if route.path_regex.match(path)), "other")


class StripRootPath:
    """Removes the prefix that a proxy puts before the paths. Requests may have it or not.

    Args:
        app: Application to call.
        root_path: Prefix without a slash at its end.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with the path after the prefix."""
        root, path = self._root_path, scope.get("path", "")
        if path == root or path.startswith(f"{root}/"):
            scope = {**scope, "path": path[len(root) :] or "/"}
        await self._app(scope, receive, send)


class RefuseWhileDraining:
    """Rejects requests that create work while the server finishes the running ones.

    Args:
        app: Application to call.
        service: The served model, with its state.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app. Raises `ApiError` with the status 503 while the server is draining."""
        if self._service.state == "draining" and scope["type"] == "http" and _creates_work(scope):
            raise draining_error()
        await self._app(scope, receive, send)


def _creates_work(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] == "POST" and path.startswith("/v1/") and not path.endswith("/cancel")
