"""The ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axlearn_plugins_serving.server import administration, endpoints
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.chat import chat_completions
from axlearn_plugins_serving.server.completions import completions
from axlearn_plugins_serving.server.embeddings import embeddings
from axlearn_plugins_serving.server.http import error_response
from axlearn_plugins_serving.server.limits import LimitRequests, ServerLimits
from axlearn_plugins_serving.server.responses import create_response
from axlearn_plugins_serving.server.service import Service

_HINTS = {404: "no such path; /openapi.json lists the paths", 405: "this path does not support the method"}


def create_app(service: Service, limits: ServerLimits | None = None) -> Starlette:
    """Build the application for a model.

    The caller starts the engine's thread in the event loop and stops it.
    """
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/stats", endpoints.statistics),
        Route("/openapi.json", endpoints.openapi),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/load_lora_adapter", administration.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", administration.unload_adapter, methods=["POST"]),
        Route("/sleep", administration.sleep, methods=["POST"]),
        Route("/wake_up", administration.wake_up, methods=["POST"]),
        Route("/is_sleeping", administration.is_sleeping),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
    ]
    paths = frozenset(route.path for route in routes)

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_CountResponses, service=service, paths=paths),
            Middleware(LimitRequests, limits=limits or ServerLimits()),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _handle_unexpected},
    )
    app.state.service = service
    return app


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _HINTS.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _handle_unexpected(request: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, "internal server error; see the server's log", code="internal_error"))


class _CountResponses:
    """ASGI middleware that counts responses by path and status."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]):
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app and count its response."""
        path = scope.get("path")
        path = path if path in self._paths else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, count if scope["type"] == "http" else send)
