"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Piece, Reasoning
from axlearn_plugins_serving.server.answer_blocks import AnswerBlocks, new_call_id
from axlearn_plugins_serving.server.answer_reader import new_reader
from axlearn_plugins_serving.server.conversation import Conversation, choose_tools
from axlearn_plugins_serving.server.http import DONE, EventStream, UsageReport, event, read_json, respond
from axlearn_plugins_serving.server.logprobs import chat_logprobs, prompt_logprobs
from axlearn_plugins_serving.server.prompt_job import Choice, Delta, Job, ScoredToken
from axlearn_plugins_serving.server.schemas import ChatRequest, TokenizeRequest
from axlearn_plugins_serving.server.service import Service


async def chat_completions(request: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_json(ChatRequest, request)
    service.adapter(body.model)
    conversation = chat_conversation(body)
    prompt = await service.render(conversation, len(await request.body()))
    job = await service.submit(
        [prompt.tokens],
        body,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        reader=new_reader(service.formats, conversation, prompt.text, stream=bool(body.stream)),
        param="messages",
    )
    answers = _Answers(service, body, job)
    if body.stream:
        return EventStream(answers.events(), job)
    return await respond(request, answers.answer(), job)


def chat_conversation(body: ChatRequest | TokenizeRequest) -> Conversation:
    """Return the conversation of a request.

    Raises:
        ApiError: 400 if `tool_choice` needs a tool that the request does not have.
    """
    return Conversation(
        messages=[message.template_fields for message in body.messages or ()],
        use=choose_tools([tool.sent for tool in body.tools or ()], body.tool_choice, body.parallel_tool_calls),
        options=body.chat_template_kwargs or {},
        prompt=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
        effort=body.reasoning_effort,
        budget=body.thinking_token_budget if isinstance(body, ChatRequest) else None,
    )


@attrs.define
class _Answers:
    """The choices of a chat completion."""

    service: Service
    body: ChatRequest
    job: Job
    head: dict[str, Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.head = {
            "id": self.service.new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": self.job.model,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        report = UsageReport(self.body.stream_options)
        started: set[int] = set()
        pending = [_Tokens() for _ in self.job.choices]
        async for deltas in self.job.deltas():
            for delta in deltas:
                index, tokens = delta.index, pending[delta.index]
                tokens.add(delta)
                fields = [f for f in map(self._delta_fields, delta.pieces) if f]
                waits = tokens.scored or (self.body.return_token_ids and tokens.ids)
                if not fields and ((waits and not delta.pieces) or (index not in started and delta.finish)):
                    fields = [{"content": ""}]
                for each in fields:
                    head = {} if index in started else {"role": "assistant"}
                    prompt = {} if started else self._prompt_fields()
                    started.add(index)
                    yield self._event(index, {**head, **each}, report, tokens=tokens, prompt=prompt)
                    tokens = pending[index] = _Tokens()
                if delta.finish:
                    rest = tokens if tokens.ids or tokens.scored else None
                    yield self._event(index, {}, report, tokens=rest, finish=delta.finish)
        if report.last:
            chunk = {**self.head, "object": "chat.completion.chunk", "choices": []}
            yield event({**chunk, "usage": self.job.usage.as_json()})
        yield DONE

    async def answer(self) -> dict[str, Any]:
        """Return the complete response."""
        answers = [AnswerBlocks() for _ in self.job.choices]
        tokens = [_Tokens() for _ in self.job.choices]
        async for batch in self.job.deltas():
            for delta in batch:
                answers[delta.index].add(delta.pieces)
                tokens[delta.index].add(delta)
        choices = [self._choice(choice, answers[choice.index], tokens[choice.index]) for choice in self.job.choices]
        head = {**self.head, "object": "chat.completion", **self._prompt_fields()}
        return {**head, "choices": choices, "usage": self.job.usage.as_json()}

    def _choice(self, choice: Choice, answer: AnswerBlocks, tokens: "_Tokens") -> dict[str, Any]:
        fields = {"refusal": None, **answer.message}
        if self.body.include_reasoning is False:
            fields.pop("reasoning_content", None)
        return {
            "index": choice.index,
            "message": fields,
            "logprobs": self._logprobs(tokens),
            "finish_reason": choice.finish,
            **self._token_ids(tokens),
        }

    def _delta_fields(self, piece: Piece) -> dict[str, Any]:
        """Return the fields of a `delta` object, or none if the client does not want the piece."""
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": piece.id or new_call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text} if self.body.include_reasoning is not False else {}
        return {"content": piece.text}

    def _event(
        self,
        index: int,
        fields: dict[str, Any],
        report: UsageReport,
        *,
        tokens: "_Tokens | None" = None,
        prompt: Mapping[str, Any] = MappingProxyType({}),
        finish: str | None = None,
    ) -> bytes:
        logprobs = None if tokens is None else self._logprobs(tokens)
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}
        choice |= {} if tokens is None else self._token_ids(tokens)
        chunk = {**self.head, "object": "chat.completion.chunk", **prompt, "choices": [choice]}
        return event({**chunk, **report.fields(self.job)})

    def _token_ids(self, tokens: "_Tokens") -> dict[str, Any]:
        return {"token_ids": tokens.ids} if self.body.return_token_ids else {}

    def _prompt_fields(self) -> dict[str, Any]:
        """Return the fields about the prompt, which all choices share."""
        first, fields = self.job.choices[0], {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = first.request.prompt
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.service.grammars, first, self.body.prompt_logprobs)
        return fields

    def _logprobs(self, tokens: "_Tokens") -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.grammars, tokens.scored, self.body.top_logprobs or 0)


@attrs.define
class _Tokens:
    """Tokens of a choice that no event has reported yet.

    Attributes:
        ids: The tokens.
        scored: Their log-probabilities, if requested.
    """

    ids: list[int] = attrs.field(factory=list)
    scored: list[ScoredToken] = attrs.field(factory=list)

    def add(self, delta: Delta) -> None:
        """Append the tokens of a delta."""
        self.ids += delta.tokens
        self.scored += delta.scored
