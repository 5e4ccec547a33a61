"""Endpoints that change the server: sleep, wake-up and adapters. They are off by default."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from axlearn_core.errors import AxlearnError, RequestError
from axlearn_plugins_serving.engine_capabilities import ChangesAdapters, Sleeps
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.http import read_json
from axlearn_plugins_serving.server.schemas import LoadAdapterRequest, UnloadAdapterRequest
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


async def load_adapter(request: HttpRequest) -> Response:
    """Load an adapter from a directory on the server."""
    service, engine = _changer(request)
    body = await read_json(LoadAdapterRequest, request)
    name = body.lora_name
    async with service.administration:
        service.check_accepting()
        if name in (service.name, *service.aliases, *service.adapters):
            raise ApiError(400, f"lora_name: {name!r} is in use already", param="lora_name")
        try:  # files and weights are read in a thread, so that requests continue
            adapter = await asyncio.to_thread(engine.read_adapter, name, body.lora_path)
        except (OSError, AxlearnError) as error:
            raise ApiError(400, str(error), param="lora_path", code="invalid_adapter") from None
        await _call(service, lambda: engine.add_adapter(name, adapter))
        service.adapters = engine.adapters
    return PlainTextResponse(f"adapter {name} is loaded")


async def unload_adapter(request: HttpRequest) -> Response:
    """Unload an adapter. Requests that use it finish first, but new ones get a 404."""
    service, engine = _changer(request)
    body = await read_json(UnloadAdapterRequest, request)
    name = body.lora_name
    async with service.administration:
        service.check_accepting()
        if name not in service.adapters:
            raise ApiError(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found")
        await _call(service, lambda: engine.remove_adapter(name))
        service.adapters = engine.adapters
    return PlainTextResponse(f"adapter {name} is unloaded")


def check_origin(request: HttpRequest) -> None:
    """Raise `ApiError` (403) if a web page from another site sent a request.

    Browsers send POST requests without a body to any site, and name the page's site in `Origin`.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
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


def _changer(request: HttpRequest) -> tuple[Service, ChangesAdapters]:
    service: Service = request.app.state.service
    if not service.allows_adapters:
        raise ApiError(404, "this path is off; start the server with --allow-adapters", code="disabled")
    engine = service.thread.engine
    if not isinstance(engine, ChangesAdapters):
        raise ApiError(400, f"a {type(engine).__name__} cannot change its adapters", code="unsupported")
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
