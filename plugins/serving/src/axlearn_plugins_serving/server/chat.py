"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.server.http import DONE, EventStream, UsageReport, event, read_json, respond
from axlearn_plugins_serving.server.logprobs import chat_logprobs, prompt_logprobs
from axlearn_plugins_serving.server.prompt_job import Delta, Job
from axlearn_plugins_serving.server.schemas import ChatRequest, Message, Tool
from axlearn_plugins_serving.server.service import Service


async def chat_completions(request: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_json(ChatRequest, request)
    service.adapter(body.model)
    prompt = await service.render(lambda: _conversation(body), len(await request.body()))
    job = await service.submit(
        [prompt],
        body,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        param="messages",
    )
    answers = _Answers(service, body, job)
    if body.stream:
        return EventStream(answers.events(), job)
    return await respond(request, answers.answer(), job)


def _conversation(body: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    return template_input(body.messages, body.tools if body.tool_choice != "none" else None)


def template_input(
    messages: Sequence[Message], tools: Sequence[Tool] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages, and the tools or None, as the client sent them.

    The chat template normalizes them.
    """
    return [template_message(message) for message in messages], [tool.sent for tool in tools or ()] or None


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as the client sent it.

    `normalize_messages` converts it to what templates expect.
    """
    return message.sent


@attrs.define
class _Answers:
    """The choices of a chat completion."""

    service: Service
    body: ChatRequest
    job: Job
    head: dict[str, Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.head = {
            "id": self.service.new_id("chatcmpl"),
            "created": int(time.time()),
            "model": self.body.model or self.service.name,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        report = UsageReport(self.body.stream_options)
        started: set[int] = set()
        async for deltas in self.job.deltas():
            for delta in deltas:
                head = {} if delta.index in started else {"role": "assistant"}
                tokens = self.body.return_token_ids and delta.tokens
                if delta.text or delta.scored or tokens or (head and delta.finish):
                    yield self._event(delta.index, {**head, "content": delta.text}, report, delta, first=not started)
                    started.add(delta.index)
                if delta.finish:
                    yield self._event(delta.index, {}, report, finish=delta.finish)
        if report.last:
            chunk = {**self.head, "object": "chat.completion.chunk", "choices": []}
            yield event({**chunk, "usage": self.job.usage.as_json()})
        yield DONE

    async def answer(self) -> dict[str, Any]:
        """Return the complete response."""
        deltas: list[list[Delta]] = [[] for _ in self.job.choices]
        async for batch in self.job.deltas():
            for delta in batch:
                deltas[delta.index].append(delta)
        choices = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": "".join(delta.text for delta in deltas[choice.index]),
                    "refusal": None,
                },
                "logprobs": self._logprobs(*deltas[choice.index]),
                "finish_reason": choice.finish,
                **self._token_ids(*deltas[choice.index]),
            }
            for choice in self.job.choices
        ]
        head = {**self.head, "object": "chat.completion", **self._prompt_fields()}
        return {**head, "choices": choices, "usage": self.job.usage.as_json()}

    def _event(
        self,
        index: int,
        fields: dict[str, Any],
        report: UsageReport,
        delta: Delta | None = None,
        finish: str | None = None,
        *,
        first: bool = False,
    ) -> bytes:
        logprobs = None if delta is None else self._logprobs(delta)
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}
        choice |= {} if delta is None else self._token_ids(delta)
        prompt = self._prompt_fields() if first else {}
        chunk = {**self.head, "object": "chat.completion.chunk", **prompt, "choices": [choice]}
        return event({**chunk, **report.fields(self.job)})

    def _token_ids(self, *deltas: Delta) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": [token for delta in deltas for token in delta.tokens]}

    def _prompt_fields(self) -> dict[str, Any]:
        """Return the fields about the prompt, which all choices share."""
        first, fields = self.job.choices[0], {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = first.request.prompt
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.service.grammars, first, self.body.prompt_logprobs)
        return fields

    def _logprobs(self, *deltas: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        scored = [s for delta in deltas for s in delta.scored]
        return chat_logprobs(self.service.grammars, scored, self.body.top_logprobs or 0)
