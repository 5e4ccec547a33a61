"""`BackgroundResponses`: responses that are computed after their request was answered."""

import asyncio
import contextlib
from typing import Any, Protocol

from axlearn_plugins_serving.server.api_errors import ApiError, unexpected_error
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.server_log import log


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
        """Store the response. Raises `ApiError` if it cannot be stored."""
        ...

    async def fail(self, error: ApiError) -> dict[str, Any]:
        """Store the response as failed."""
        ...


class BackgroundResponses:
    """The background responses that are running."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, answer: BackgroundAnswer) -> dict[str, Any]:
        """Store a response as queued, and begin to compute it. Returns the stored response.

        Raises:
            ApiError: The response cannot be stored.
        """
        response = answer.as_json("queued")
        try:
            await answer.store(response)
        except BaseException:
            answer.job.close()
            raise
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
            await answer.fail(error)
        except asyncio.CancelledError:
            try:
                await answer.store(answer.as_json("cancelled"))
            except ApiError as error:
                log.warning("the cancelled response %s is not stored: %s", answer.id, error.message)
        except Exception:
            log.exception("the response %s failed", answer.id)
            await answer.fail(unexpected_error())
        finally:
            answer.job.close()
            del self._tasks[answer.id]
