"""`POST /v1/messages`: the API of Anthropic."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import attrs
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from axlearn_plugins_serving.server.answer_blocks import AnswerBlocks, Block, Change
from axlearn_plugins_serving.server.answer_reader import new_reader
from axlearn_plugins_serving.server.anthropic_schemas import (
    AnthropicMessage,
    AnthropicToolChoice,
    MessagesRequest,
    MessageTokensRequest,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import Conversation, ToolUse, choose_tools
from axlearn_plugins_serving.server.http import EventStream, event, read_json, respond
from axlearn_plugins_serving.server.message_schemas import NamedTool
from axlearn_plugins_serving.server.prompt_job import Job
from axlearn_plugins_serving.server.schemas import JsonSchemaFormat, SamplingFields
from axlearn_plugins_serving.server.service import Service

PATH = "/v1/messages"
_NO_THREAD = "thread_not_found"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(request: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_json(MessagesRequest, request)
    service.adapter(body.model)
    conversation = _conversation(body, can_reason=service.formats.reasoning is not None)
    prompt = await service.render(conversation, len(await request.body()))
    fields = SamplingFields(
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        stop=body.stop_sequences,
        user=body.metadata.user_id if body.metadata is not None else None,
        response_format=_format(body.output_config),
    )
    reader = new_reader(service.formats, conversation, prompt.text, stream=bool(body.stream))
    job = await service.submit([prompt.tokens], fields, max_tokens=body.max_tokens, reader=reader, param="messages")
    answer = _Answer(service, body, job)
    if body.stream:
        return EventStream(answer.events(), job)
    return await respond(request, answer.answer(), job)


async def count_message_tokens(request: HttpRequest) -> Response:
    """Count the tokens of a conversation."""
    service: Service = request.app.state.service
    body = await read_json(MessageTokensRequest, request)
    service.adapter(body.model)
    conversation = _conversation(body, can_reason=service.formats.reasoning is not None)
    prompt = await service.render(conversation, len(await request.body()), limited=False)
    return JSONResponse({"input_tokens": len(prompt.tokens)})


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    detail = error.body["error"]
    kind = {429: "rate_limit_error", 503: "overloaded_error"}.get(error.status, detail["type"])
    fields: dict[str, Any] = {"type": "api_error" if kind == "server_error" else kind, "message": error.message}
    if error.code == _NO_THREAD:  # the client repeats the request with all messages
        fields["details"] = {"error_code": _NO_THREAD}
    return {"type": "error", "error": fields}


def _conversation(body: MessageTokensRequest, *, can_reason: bool) -> Conversation:
    if body.thread is not None and body.thread.type == "continue":
        message = "thread: this server does not keep threads; send the whole conversation"
        raise ApiError(404, message, param="thread", code=_NO_THREAD)
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for i, message in enumerate(body.messages):
        converted = list(_chat_messages(message))
        if not converted:
            path = f"messages[{i}].content"
            raise ApiError(400, f"{path}: the message is empty", param=path)
        messages += converted
    effort = body.output_config.effort if body.output_config is not None else None
    effort, budget = "xhigh" if effort == "max" else effort, None
    if body.thinking is not None:
        effort = {"disabled": "none", "enabled": effort or "medium"}.get(body.thinking.type, effort)
        budget = body.thinking.budget_tokens
    return Conversation(
        messages=messages,
        use=_tools(body),
        continues=messages[-1]["role"] == "assistant",
        effort=effort,
        is_effort_optional=True,
        budget=budget if can_reason else None,
    )


def _format(config: OutputConfig | None) -> JsonSchemaFormat | None:
    if config is None or config.format is None:
        return None
    return JsonSchemaFormat.from_schema("answer", config.format.schema_, "output_config.format.schema")


def _tools(body: MessageTokensRequest) -> ToolUse:
    tools = []
    for tool in body.tools or ():
        description = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice or AnthropicToolChoice(type="auto")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        named = NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})
        return choose_tools(tools, named, parallel, path="input_schema")
    modes: Any = {"any": "required", "auto": None}
    return choose_tools(tools, modes.get(choice.type, "none"), parallel, path="input_schema")


def _chat_messages(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield the messages of the chat template that a message stands for. Each tool result becomes a separate message."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    fields: dict[str, Any] = {}
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            fields.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, RedactedThinkingBlock):
            fields.setdefault("content", "")
        elif isinstance(block, ThinkingBlock):
            fields["reasoning_content"] = fields.get("reasoning_content", "") + block.thinking
        else:
            fields["content"] = fields.get("content", "") + block.text
    if fields:
        yield {"role": message.role, **fields}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


@attrs.define
class _Answer:
    """A message, returned in one piece or as a stream of events."""

    service: Service
    body: MessagesRequest
    job: Job
    id: str = attrs.field(init=False)
    blocks: AnswerBlocks = attrs.field(factory=AnswerBlocks, init=False)

    def __attrs_post_init__(self) -> None:
        self.id = self.service.new_id("msg_")

    async def answer(self) -> dict[str, Any]:
        """Return the complete message."""
        async for deltas in self.job.deltas():
            for delta in deltas:
                self.blocks.add(delta.pieces)
        self.blocks.end()
        return {
            **self._message([_block(block) for block in self.blocks.blocks]),
            **self._stop(),
            "usage": self._usage(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events."""
        empty = {"stop_reason": None, "stop_sequence": None}
        yield self._event("message_start", message={**self._message([]), **empty, "usage": self._usage()})
        try:
            async for deltas in self.job.deltas():
                for delta in deltas:
                    for change in self.blocks.add(delta.pieces):
                        yield self._change(change)
        except ApiError as error:
            yield event(anthropic_error(error), "error")
            return
        for change in self.blocks.end():
            yield self._change(change)
        yield self._event("message_delta", delta=self._stop(), usage=self._usage())
        yield self._event("message_stop")

    def _change(self, change: Change) -> bytes:
        block = change.block
        if change.kind == "open":
            return self._event("content_block_start", index=block.index, content_block=_block(block, empty=True))
        if change.kind == "close":
            return self._event("content_block_stop", index=block.index)
        kind, field = {
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return self._event("content_block_delta", index=block.index, delta={"type": kind, field: change.text})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.job.model
        return {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _stop(self) -> dict[str, Any]:
        choice = self.job.choices[0]
        reason = _REASONS.get(choice.finish or "", "stop_sequence" if choice.matched_stop else "end_turn")
        return {"stop_reason": reason, "stop_sequence": choice.matched_stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        usage = self.job.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }


def _block(block: Block, *, empty: bool = False) -> dict[str, Any]:
    if block.kind == "call":
        arguments = {} if empty else _arguments(block.text)
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "" if empty else block.text, "signature": ""}
    return {"type": "text", "text": "" if empty else block.text}


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Arguments that were cut off, or that JSON cannot express, are left out."""
    try:
        arguments = json.loads(text)
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {}
    return arguments
