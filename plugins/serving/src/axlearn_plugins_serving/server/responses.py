"""`/v1/responses`: create, read, delete and cancel responses, and count the tokens of their input."""

import asyncio
import json
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from axlearn_plugins_serving.server.answer_reader import new_reader
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import Conversation, choose_tools
from axlearn_plugins_serving.server.http import EventStream, read_json, respond
from axlearn_plugins_serving.server.message_schemas import AllowedTools, NamedTool
from axlearn_plugins_serving.server.response_answer import ResponseAnswer
from axlearn_plugins_serving.server.response_items import ItemReference, item_messages, parse_item
from axlearn_plugins_serving.server.response_store import MAX_RECORD_BYTES, StoredResponse
from axlearn_plugins_serving.server.schemas import (
    JsonSchemaFormat,
    ResponseAllowedTools,
    ResponseFormat,
    ResponseInput,
    ResponseInputTokens,
    ResponseJsonSchema,
    ResponseRequest,
    ResponseToolName,
    SamplingFields,
)
from axlearn_plugins_serving.server.service import Service


async def create_response(request: HttpRequest) -> HttpResponse:
    """Answer a prompt or a conversation."""
    service: Service = request.app.state.service
    body = await read_json(ResponseRequest, request)
    service.adapter(body.model)
    conversation, previous, size = await _conversation(service, body)
    prompt = await service.render(conversation, len(await request.body()) + size)
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    fields = SamplingFields(
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        ignore_eos=body.ignore_eos,
        response_format=_format(body),
    )
    job = await service.submit(
        [prompt.tokens],
        fields,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        reader=new_reader(service.formats, conversation, prompt.text, stream=bool(body.stream)),
        param="input",
    )
    answer = ResponseAnswer(service, body, job, conversation, previous)
    if body.stream:
        return EventStream(answer.events(), job)
    if body.background:
        return JSONResponse(await service.background.start(answer))
    return await respond(request, answer.answer(), job)


async def count_input_tokens(request: HttpRequest) -> HttpResponse:
    """Count the tokens of a response's input."""
    service: Service = request.app.state.service
    body = await read_json(ResponseInputTokens, request)
    service.adapter(body.model)
    conversation, _, size = await _conversation(service, body)
    prompt = await service.render(conversation, len(await request.body()) + size, limited=False)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


async def read_response(request: HttpRequest) -> HttpResponse:
    """Return a stored response."""
    return JSONResponse((await _stored(request)).response)


async def list_input_items(request: HttpRequest) -> HttpResponse:
    """List the items of a stored response's input. References are replaced by the items, unless these were removed."""
    service: Service = request.app.state.service
    items = (await _stored(request)).input
    if any(item.get("type") == "item_reference" for item in items):
        items = await asyncio.to_thread(lambda: [_follow_reference(service, item) for item in items])
    ids = {"first_id": items[0].get("id"), "last_id": items[-1].get("id")} if items else {}
    return JSONResponse({"object": "list", "data": items, "has_more": False, **ids})


async def delete_response(request: HttpRequest) -> HttpResponse:
    """Remove a stored response."""
    service: Service = request.app.state.service
    id = (await _stored(request)).response["id"]
    await service.background.cancel(id)
    await asyncio.to_thread(service.responses.delete, id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def cancel_response(request: HttpRequest) -> HttpResponse:
    """Cancel a background response."""
    service: Service = request.app.state.service
    stored = await _stored(request)
    if not stored.response["background"]:
        raise ApiError(400, "only responses with background: true can be cancelled", param="response_id")
    await service.background.cancel(stored.response["id"])
    return JSONResponse((await _stored(request)).response)


async def _stored(request: HttpRequest) -> StoredResponse:
    service: Service = request.app.state.service
    id = request.path_params["id"]
    stored = await asyncio.to_thread(service.responses.get, id)
    if stored is None:
        raise ApiError(404, _unknown(service, id), param="response_id", code="response_not_found")
    return stored


def _unknown(service: Service, id: str, kind: str = "response") -> str:
    """Return why there is no stored response, or no `item` of one, with an id."""
    subject = f"no stored response has {'' if kind == 'response' else 'an item with '}the id {id[:80]!r}"
    if service.is_replica:
        return (
            f"in this replica, {subject}; replicas do not share their stored responses, so send the whole conversation"
        )
    return (
        f"{subject}; its response was created with `store: false`, was deleted, or was evicted (the server keeps the newest "
        f"{service.responses.max_responses:,} responses, up to {service.responses.max_bytes // 2**20} MiB)"
    )


def _read_items(service: Service, items: list[Any]) -> tuple[list[Any], int]:
    """Replace references by the stored items. Return all items, and the size of the stored ones in bytes."""
    stored: dict[str, tuple[Any, int]] = {}
    read, size = [], 0
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            read.append(item)
            continue
        param = f"input[{index}].id"
        if item.id not in stored:
            stored[item.id] = _read_item(service, item.id, param)
        parsed, item_size = stored[item.id]
        size += item_size
        if size > MAX_RECORD_BYTES:
            message = f"{param}: the items that input refers to have more than {MAX_RECORD_BYTES:,} bytes"
            raise ApiError(400, message, param=param, code="input_too_large")
        read.append(parsed)
    return read, size


def _follow_reference(service: Service, item: dict[str, Any]) -> dict[str, Any]:
    text = service.responses.get_item(item["id"]) if item.get("type") == "item_reference" else None
    return item if text is None else json.loads(text)


def _read_item(service: Service, id: str, param: str) -> tuple[Any, int]:
    """Return a stored item, and its size in bytes."""
    text = service.responses.get_item(id)
    if text is None:
        message = f"{param}: {_unknown(service, id, 'item')}; send the item itself"
        raise ApiError(400, message, param=param, code="item_not_found")
    try:
        return parse_item(json.loads(text)), len(text)
    except ValidationError:  # such as a call that was cut off in its arguments
        message = f"{param}: the item was cut off when its response ended, so it cannot be continued; leave it out"
        raise ApiError(400, message, param=param, code="item_incomplete") from None


async def _conversation(service: Service, body: ResponseInput) -> tuple[Conversation, StoredResponse | None, int]:
    """Return the conversation, the stored response that it continues, and the size of what was read from the store in bytes."""
    stored = None
    messages: list[Any] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if body.previous_response_id is not None:
        stored = await asyncio.to_thread(service.responses.get, body.previous_response_id)
        if stored is None:
            message = f"previous_response_id: {_unknown(service, body.previous_response_id)}"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        if stored.response["status"] in ("queued", "in_progress"):
            message = "previous_response_id: the response is not complete yet"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_incomplete")
        messages += stored.messages
    size = 0 if stored is None else stored.size
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        items: list[Any] = body.input
        if any(isinstance(item, ItemReference) for item in items):
            items, item_size = await asyncio.to_thread(_read_items, service, items)
            size += item_size
        messages += item_messages(items)
    choice = body.tool_choice
    if isinstance(choice, ResponseToolName):
        choice = NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})
    elif isinstance(choice, ResponseAllowedTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        allowed = {"mode": choice.mode, "tools": tools}
        choice = AllowedTools.model_validate({"type": "allowed_tools", "allowed_tools": allowed})
    functions = [{name: value for name, value in tool.sent.items() if name != "type"} for tool in body.tools or ()]
    tools = [{"type": "function", "function": function} for function in functions]
    conversation = Conversation(
        messages=messages,
        use=choose_tools(tools, choice, body.parallel_tool_calls, path="parameters"),
        options=body.chat_template_kwargs or {},
        effort=body.reasoning.effort if body.reasoning is not None else None,
        param="input",
    )
    return conversation, stored, size


def _format(body: ResponseRequest) -> ResponseFormat | None:
    text_format = body.text.format if body.text is not None else None
    if not isinstance(text_format, ResponseJsonSchema):
        return text_format
    return JsonSchemaFormat.from_schema(text_format.name, text_format.schema_, "text.format.schema")
