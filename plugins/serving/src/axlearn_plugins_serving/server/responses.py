"""`POST /v1/responses`.

Responses are not stored, so each request contains the whole conversation.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.http import EventStream, event, read_json, respond
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.schemas import (
    JsonSchema,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    ResponseJsonSchema,
    ResponseRequest,
    SamplingFields,
)
from axlearn_plugins_serving.server.service import Service


async def create_response(request: HttpRequest) -> Response:
    """Answer a prompt or a conversation."""
    service: Service = request.app.state.service
    body = await read_json(ResponseRequest, request)
    service.adapter(body.model)
    fields = SamplingFields(
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        response_format=_format(body),
    )
    prompt = await service.render(lambda: (_messages(body), _tools(body)), len(await request.body()))
    job = await service.submit([prompt], fields, max_tokens=body.max_output_tokens, param="input")
    answer = _Answer(service, body, job)
    if body.stream:
        return EventStream(answer.events(), job)
    return await respond(request, answer.answer(), job)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*instructions, {"role": "user", "content": body.input}]
    messages = [Message(role=m.role, content=m.content) for m in body.input]
    return [*instructions, *({"role": m.role, "content": m.text} for m in messages)]


def _tools(body: ResponseRequest) -> list[dict[str, Any]] | None:
    if not body.tools or body.tool_choice == "none":
        return None
    functions = [{name: value for name, value in tool.sent.items() if name != "type"} for tool in body.tools]
    return [{"type": "function", "function": function} for function in functions]


def _format(body: ResponseRequest) -> ResponseFormat | None:
    text_format = body.text.format if body.text is not None else None
    if not isinstance(text_format, ResponseJsonSchema):
        return text_format
    return JsonSchemaFormat(
        type="json_schema", json_schema=JsonSchema(name=text_format.name, schema=text_format.schema_)
    )


@attrs.define
class _Answer:
    """A response, returned in one piece or as a stream of events."""

    service: Service
    body: ResponseRequest
    job: Job
    id: str = attrs.field(init=False)
    item_id: str = attrs.field(init=False)
    created: float = attrs.field(factory=lambda: int(time.time()), init=False)
    sequence: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.id, self.item_id = self.service.new_id("resp"), self.service.new_id("msg")

    async def answer(self) -> dict[str, Any]:
        """Return the complete response."""
        text = "".join([delta.text async for deltas in self.job.deltas() for delta in deltas])
        return self._response(text, self._status())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events, in the order that the API defines."""
        place = {"item_id": self.item_id, "output_index": 0}
        part = {**place, "content_index": 0}
        yield self._event("response.created", response=self._response(None, "in_progress"))
        yield self._event("response.in_progress", response=self._response(None, "in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress"))
        yield self._event("response.content_part.added", **part, part=_text_part(""))
        pieces: list[str] = []
        try:
            async for deltas in self.job.deltas():
                for delta in deltas:
                    if delta.text:
                        pieces.append(delta.text)
                        yield self._event("response.output_text.delta", **part, delta=delta.text, logprobs=[])
        except ApiError as error:
            failed = self._response("".join(pieces), "failed")
            failed["error"] = {"code": "server_error", "message": error.message}
            yield self._event("response.failed", response=failed)
            return
        text, status = "".join(pieces), self._status()
        yield self._event("response.output_text.done", **part, text=text, logprobs=[])
        yield self._event("response.content_part.done", **part, part=_text_part(text))
        yield self._event("response.output_item.done", output_index=0, item=self._item(text, status))
        yield self._event(f"response.{status}", response=self._response(text, status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.sequence += 1
        return event({"type": kind, "sequence_number": self.sequence - 1, **fields}, kind)

    def _status(self) -> str:
        return "incomplete" if self.job.choices[0].finish == "length" else "completed"

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def _response(self, text: str | None, status: str) -> dict[str, Any]:
        body, usage, defaults = self.body, self.job.usage, self.service.text.sampling
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.service.response_name(body.model),
            "output": [] if text is None else [self._item(text, "incomplete" if status == "failed" else status)],
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": None,
            "store": False,
            "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
            if body.text is not None and body.text.format is not None
            else {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else counts,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
