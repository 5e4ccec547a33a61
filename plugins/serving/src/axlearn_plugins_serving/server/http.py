"""Responses: JSON, events, and what happens when a client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.schemas import StreamOptions

DONE = b"data: [DONE]\n\n"

T = TypeVar("T", bound=BaseModel)


async def read_body(request: HttpRequest) -> bytes:
    """The body of a request that says it is JSON.

    A browser sends such a request to another site only after that site has allowed it, and this server never does.

    Raises:
        ApiError: 415, another content type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind[:80] or 'missing'!r}; send application/json")
    return await request.body()


async def read_json(model: type[T], request: HttpRequest) -> T:
    """The body of a request, checked.

    Raises:
        ApiError: 415, another content type; 400, see `BodyCheck.parse`.
    """
    body, service = await read_body(request), request.app.state.service
    return await service.text_pool.run(lambda: service.bodies.parse(model, body), len(body))


def error_response(error: ApiError) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error.body, error.status, error.headers)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(StreamingResponse):
    """Events of a job, which ends when the client leaves."""

    def __init__(self, events: AsyncIterator[bytes], job: Job):
        super().__init__(_with_errors(events), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`events`; an error ends them as an event of its own."""
    try:
        async for chunk in events:
            yield chunk
    except ApiError as error:
        yield event(error.body)
        yield DONE


async def respond(request: HttpRequest, answer: Coroutine[Any, Any, Any], job: Job) -> Response:
    """The answer of a job as JSON; the job ends when the client leaves first."""
    task = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(task.result())
    finally:
        job.close()
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_disconnect(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class UsageReport:
    """The `usage` of a stream's events, as `stream_options` asks for it."""

    def __init__(self, options: StreamOptions | None):
        self.last = options is not None and options.include_usage
        self._each = self.last and options is not None and options.continuous_usage_stats

    def fields(self, job: Job) -> dict[str, Any]:
        """What an event says of the usage so far."""
        return {"usage": job.usage.as_json() if self._each else None} if self.last else {}
