"""`/sleep`, `/wake_up` and `/is_sleeping`. They are off by default."""

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from axlearn_core.errors import AxlearnError, RequestError
from axlearn_plugins_serving.contracts import Sleeps
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.service import Service, engine_errors

_POLL_SECONDS = 0.02
_LEVELS = {"1": 1, "2": 2}


async def sleep(request: HttpRequest) -> Response:
    """Finish the running requests, and free the memory of the devices. New requests get a 503 meanwhile."""
    service, engine = _sleeper(request)
    level = _LEVELS.get(request.query_params.get("level", "1"))
    if level is None:
        raise ApiError(400, f"level: {request.query_params['level'][:80]!r} is neither 1 nor 2", param="level")
    async with service.administration:
        service.check_accepting()
        service.state = "sleeping"
        try:
            while service.thread.active:
                await asyncio.sleep(_POLL_SECONDS)
            await _call(service, lambda: engine.sleep(level))
        except Exception:
            _resume(service)
            raise
    return Response()


async def wake_up(request: HttpRequest) -> Response:
    """Restore the weights and an empty cache, and accept requests again."""
    service, engine = _sleeper(request)
    async with service.administration:
        await _call(service, engine.wake_up)
        _resume(service)
    return Response()


async def is_sleeping(request: HttpRequest) -> Response:
    """Return whether the server sleeps."""
    service: Service = request.app.state.service
    return JSONResponse({"is_sleeping": service.state == "sleeping"})


def check_origin(request: HttpRequest) -> None:
    """Raise `ApiError` (403) if a web page from another site sent a request.

    Browsers send POST requests without a body to any site, and name the page's site in `Origin`.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, "web pages from other sites cannot administer this server", code="cross_site")


def _sleeper(request: HttpRequest) -> tuple[Service, Sleeps]:
    service: Service = request.app.state.service
    check_origin(request)
    if not service.allows_sleep:
        raise ApiError(404, "this path is off; start the server with --allow-sleep", code="disabled")
    engine = service.thread.engine
    if not isinstance(engine, Sleeps):
        raise ApiError(400, f"a {type(engine).__name__} cannot sleep", code="unsupported")
    return service, engine


async def _call(service: Service, function: Callable[[], None]) -> None:
    """Call a function in the engine's thread, and convert its errors."""
    with engine_errors():
        try:
            await service.thread.call(function)
        except AxlearnError as error:
            raise ApiError(400 if isinstance(error, RequestError) else 500, str(error)) from None


def _resume(service: Service) -> None:
    """Accept requests again, unless the server is stopping or has failed."""
    if service.state == "sleeping":
        service.state = "ok"
