"""Helpers for request bodies, and for JSON and event-stream responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.schemas import StreamOptions

DONE = b"data: [DONE]\n\n"

T = TypeVar("T", bound=BaseModel)


async def read_body(request: HttpRequest) -> bytes:
    """Return the body of a request whose content type is JSON.

    Browsers send cross-site requests of this type only if the server allows them, which this server never does.

    Raises:
        ApiError: 415 for any other content type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind[:80] or 'missing'!r}; send application/json")
    return await request.body()


async def read_json(model: type[T], request: HttpRequest) -> T:
    """Return the parsed and validated body of a request.

    Raises:
        ApiError: 415 for any content type other than JSON; 400 as in `BodyCheck.parse`.
    """
    body, service = await read_body(request), request.app.state.service
    return await service.text_pool.run(lambda: service.bodies.parse(model, body), len(body))


def error_response(error: ApiError) -> JSONResponse:
    """Build the response for an error."""
    return JSONResponse(error.body, error.status, error.headers)


def event(data: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


_KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""


class EventStream(StreamingResponse):
    """A stream of a job's events. The job ends if the client disconnects.

    If there is no event for some time, for example because the request waits in the queue, the stream sends a comment, so that no
    proxy closes the connection.
    """

    def __init__(self, events: AsyncIterator[bytes], job: Job):
        super().__init__(_with_errors(events), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        stream = _KeepAlive(send, scope["app"].state.limits.keep_alive_seconds)
        try:
            await super().__call__(scope, receive, stream.send)
        finally:
            stream.stop()
            self._job.close()


class _KeepAlive:
    """Sends a comment if nothing was sent for some time."""

    def __init__(self, send: Send, seconds: float):
        self._send, self._seconds = send, seconds
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._last = self._loop.time()
        self._task: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        async with self._turn:
            await self._send(message)
        self._last = self._loop.time()
        if message["type"] == "http.response.start":
            self._task = asyncio.ensure_future(self._run())
        elif not message.get("more_body"):
            self.stop()

    def stop(self) -> None:
        """Send no more comments."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._last + self._seconds - self._loop.time())
            async with self._turn:
                if self._loop.time() >= self._last + self._seconds:
                    await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                    self._last = self._loop.time()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield `events`. If they raise an error, yield it as the last event."""
    try:
        async for chunk in events:
            yield chunk
    except ApiError as error:
        yield event(error.body)
        yield DONE


class Closes(Protocol):
    """Work for a request, which ends if the client disconnects."""

    def close(self) -> None:
        """End the work."""
        ...


async def respond(request: HttpRequest, answer: Coroutine[Any, Any, Any], job: Closes) -> Response:
    """Return a job's answer, encoded as JSON unless it is a response already.

    End the job if the client disconnects first.
    """
    task = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)  # the client is gone
        result = task.result()
        return result if isinstance(result, Response) else JSONResponse(result)
    finally:
        job.close()
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_disconnect(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class UsageReport:
    """The `usage` in the events of a stream, as requested by `stream_options`."""

    def __init__(self, options: StreamOptions | None):
        self.last = options is not None and options.include_usage
        self._each = self.last and options is not None and options.continuous_usage_stats

    def fields(self, job: Job) -> dict[str, Any]:
        """Return the usage fields of an event."""
        return {"usage": job.usage.as_json() if self._each else None} if self.last else {}
