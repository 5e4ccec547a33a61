"""The ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from axlearn_plugins_serving.server import administration, anthropic_messages, endpoints
from axlearn_plugins_serving.server.api_errors import ApiError, unexpected_error
from axlearn_plugins_serving.server.chat import chat_completions
from axlearn_plugins_serving.server.completions import completions
from axlearn_plugins_serving.server.embeddings import embeddings
from axlearn_plugins_serving.server.http import error_response
from axlearn_plugins_serving.server.limits import LimitRequests, ServerLimits
from axlearn_plugins_serving.server.request_middleware import RecordRequests, RefuseWhileDraining, StripRootPath
from axlearn_plugins_serving.server.request_record import REQUEST_ID
from axlearn_plugins_serving.server.responses import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    read_response,
)
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_serving.server.tracing import Tracer

_HINTS = {404: "no such path; /openapi.json lists the paths", 405: "this path does not support the method"}


def create_app(service: Service, limits: ServerLimits | None = None, tracer: Tracer | None = None) -> ASGIApp:
    """Build the application for a model.

    The caller starts the engine's thread in the event loop and stops it.

    Args:
        service: The model.
        limits: Limits on requests, and rules for who may send them.
        tracer: Exports a span for each request; None exports nothing.
    """
    limits = limits or ServerLimits()
    routes = _routes()
    starlette = Starlette(
        routes=routes,
        middleware=[
            Middleware(_AnswerErrors),
            Middleware(LimitRequests, limits=limits),
            Middleware(RefuseWhileDraining, service=service),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _handle_unexpected},
    )
    starlette.state.service, starlette.state.limits = service, limits
    app: ASGIApp = starlette
    if limits.origins:  # outside of Starlette, whose answers to unexpected errors skip its middleware
        app = CORSMiddleware(
            app,
            allow_origins=limits.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    app = RecordRequests(app, service, routes, tracer)
    return StripRootPath(app, limits.root_path) if limits.root_path else app


def _routes() -> list[Route]:
    return [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/ping", endpoints.health, methods=["GET", "POST"]),
        Route("/version", endpoints.version),
        Route("/load", endpoints.load),
        Route("/metrics", endpoints.metrics),
        Route("/stats", endpoints.statistics),
        Route("/openapi.json", endpoints.openapi),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", read_response),
        Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", list_input_items),
        Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
        Route(anthropic_messages.PATH, anthropic_messages.create_message, methods=["POST"]),
        Route(f"{anthropic_messages.PATH}/count_tokens", anthropic_messages.count_message_tokens, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/load_lora_adapter", administration.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", administration.unload_adapter, methods=["POST"]),
        Route("/sleep", administration.sleep, methods=["POST"]),
        Route("/wake_up", administration.wake_up, methods=["POST"]),
        Route("/is_sleeping", administration.is_sleeping),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
    ]


class _AnswerErrors:
    """ASGI middleware that answers the errors of the middleware inside it in the format of the path's API."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, and answer an `ApiError`."""
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await _error_response(HttpRequest(scope), error)(scope, receive, send)


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(request, error)


def _error_response(request: HttpRequest, error: ApiError) -> Response:
    if request.url.path.startswith(anthropic_messages.PATH):
        return JSONResponse(anthropic_messages.anthropic_error(error), error.status, error.headers)
    return error_response(error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _HINTS.get(error.status_code, error.detail)
    return _error_response(request, ApiError(error.status_code, message, headers=error.headers))


async def _handle_unexpected(request: HttpRequest, error: Exception) -> Response:
    return _error_response(request, unexpected_error())
