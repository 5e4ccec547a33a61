"""`BackgroundResponses`: responses that are computed after their request was answered."""

import asyncio
import contextlib
from typing import Any, Protocol

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.prompt_job import Job


class BackgroundAnswer(Protocol):
    """A response that can be computed and stored.

    Attributes:
        id: Id of the response.
        job: The engine's request.
    """

    id: str
    job: Job

    async def answer(self) -> dict[str, Any]:
        """Compute and store the response."""
        ...

    def as_json(self, status: str) -> dict[str, Any]:
        """Return the response with the output so far."""
        ...

    async def store(self, response: dict[str, Any]) -> None:
        """Store the response."""
        ...


class BackgroundResponses:
    """The background responses that are running."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, answer: BackgroundAnswer) -> dict[str, Any]:
        """Store a response as queued, and begin to compute it. Returns the stored response."""
        response = answer.as_json("queued")
        await answer.store(response)
        self._tasks[answer.id] = asyncio.ensure_future(self._compute(answer))
        return response

    async def cancel(self, id: str) -> None:
        """Stop computing a response, if it is running. It is stored with the status `cancelled`."""
        if (task := self._tasks.get(id)) is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _compute(self, answer: BackgroundAnswer) -> None:
        try:
            await answer.answer()
        except ApiError as error:
            failed = {**answer.as_json("failed"), "error": {"code": "server_error", "message": error.message}}
            await answer.store(failed)
        except asyncio.CancelledError:
            await answer.store(answer.as_json("cancelled"))
        finally:
            answer.job.close()
            del self._tasks[answer.id]
