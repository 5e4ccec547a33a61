"""Clients of a server that call tools: over all chat endpoints, with good and with malformed histories."""

import json

from support.bad_requests import CHAT, MESSAGES, RESPONSE, Bad
from support.scripted_models import WEATHER, prompt_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
ARGUMENTS = {"city": "Rome", "days": 3}
ANSWER = "It is sunny."
USER = {"role": "user", "content": "Weather?"}
FUNCTION = WEATHER["function"]
FLAT = {"type": "function", "name": "get_weather", "parameters": FUNCTION["parameters"]}
NAMED = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}


def script(request):
    """Return the output of a model that calls the tool once, then answers; None if the prompt has no tools."""
    prompt = prompt_of(request)
    if "Tools:" not in prompt:
        return None
    output = ANSWER if "<|tool|>" in prompt else f"One moment.{CALL}"
    return list(f"<think>\nHm.\n</think>\n\n{output}".encode())


async def post(client, path, body, status=200):
    response = await client.post(path, json=body)
    assert response.status_code == status, (path, response.status_code, response.text[:300])
    return response.json()


async def chat(client, number):
    messages, body = [{**USER, "content": f"Weather {number}?"}], {"tools": [WEATHER]}
    for turn in range(2):
        answer = (await post(client, CHAT, {**body, "messages": messages}))["choices"][0]["message"]
        assert answer["reasoning_content"] == "Hm."
        if turn == 0:
            (call,) = answer["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    assert answer["content"] == ANSWER


async def chat_stream(client, number):
    body = {"messages": [{**USER, "content": f"Stream {number}?"}], "tools": [WEATHER], "stream": True}
    arguments, finish = "", None
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                finish = choice["finish_reason"] or finish
                for call in choice["delta"].get("tool_calls") or ():
                    arguments += call["function"]["arguments"]
    assert (json.loads(arguments), finish) == (ARGUMENTS, "tool_calls")


async def leave_stream(client, number):
    """Leave a stream in the middle of a tool call."""
    body = {"messages": [{**USER, "content": f"Leave {number}?"}], "tools": [WEATHER], "stream": True}
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if "tool_calls" in line:
                return


async def message(client, number):
    body = {"max_tokens": 500, "tools": [NAMED], "messages": [{**USER, "content": f"Message {number}?"}]}
    content = (await post(client, MESSAGES, body))["content"]
    assert content[-1]["input"] == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "sunny"}
    body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert (await post(client, MESSAGES, body))["content"][-1]["text"] == ANSWER


async def response(client, number):
    """Continue a response: a stored one by its id, another one by its items."""
    stores, items = number % 2 == 0, [{**USER, "content": f"Response {number}?"}]
    body = {"tools": [FLAT], "store": stores}
    first = await post(client, RESPONSE, {**body, "input": items})
    call = first["output"][-1]
    assert json.loads(call["arguments"]) == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    if stores:
        second = await post(client, RESPONSE, {**body, "input": [result], "previous_response_id": first["id"]})
        assert (await client.delete(f"{RESPONSE}/{first['id']}")).status_code == 200
    else:
        second = await post(client, RESPONSE, {**body, "input": [*items, *first["output"], result]})
    assert second["output"][-1]["content"][0]["text"] == ANSWER


def _chat_bad(name, messages, says="", **fields):
    body = {"messages": messages, "tools": [WEATHER], **fields}
    return Bad(name, CHAT, json.dumps(body).encode(), says=says)


def _called(**function):
    return [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]


def _bad(name, path, says="", **body):
    return Bad(name, path, json.dumps(body).encode(), says=says)


def _tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


LONG = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 100} for i in range(600)}}
DEEP = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
MALFORMED = (
    _chat_bad("no-name", _called(arguments="{}"), "is required"),
    _chat_bad("no-function", [USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}], "is required"),
    _chat_bad("half-arguments", _called(name="f", arguments='{"city": "Ro'), "not JSON"),
    _chat_bad("list-arguments", _called(name="f", arguments="[1]"), "not a JSON object"),
    _chat_bad("calls-object", [USER, {"role": "assistant", "tool_calls": {}}], "valid array"),
    _chat_bad("result-object", [*_called(name="f", arguments="{}"), {"role": "tool", "content": {}}]),
    _chat_bad("result-missing", [*_called(name="f", arguments="{}"), {"role": "tool", "tool_call_id": "c"}]),
    _chat_bad("many-calls", [{"role": "assistant", "tool_calls": _called(name="f")[1]["tool_calls"] * 5000}]),
    _chat_bad("long-schema", [USER], "characters", tools=[], response_format={
        "type": "json_schema", "json_schema": {"name": "s", "schema": LONG}}),
    _chat_bad("long-tool-schema", [USER], "context has", tools=[_tool(LONG)]),
    _chat_bad("choice", [USER], "no tool has the name", tool_choice={"type": "function", "function": {"name": "g"}}),
    _bad("anthropic-result", MESSAGES, max_tokens=9, messages=[{"role": "user", "content": [{"type": "tool_result"}]}]),
    _bad("anthropic-input", MESSAGES, max_tokens=9, messages=[
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": [1]}]}]),
    _bad("anthropic-schema", MESSAGES, max_tokens=9, messages=[USER], tools=[{"name": "f", "input_schema": 3}]),
    _bad("response-output", RESPONSE, input=[{"type": "function_call_output", "call_id": "c"}]),
    _bad("response-arguments", RESPONSE, input=[
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
    _bad("response-lost", RESPONSE, input="a", previous_response_id="resp_0"),
)  # fmt: skip
"""Malformed histories, and schemas that are too long."""


async def malformed(client, number):
    wrong = MALFORMED[number % len(MALFORMED)]
    refused = await client.post(wrong.path, content=wrong.content, headers={"content-type": wrong.kind})
    assert refused.status_code == wrong.status, (wrong.name, refused.status_code, refused.text[:300])
    assert wrong.says in refused.json()["error"]["message"], (wrong.name, refused.text[:300])


async def deep_schema(client, number):
    """Require a call whose schema is deep."""
    body = {"messages": [USER], "tools": [_tool(DEEP)], "tool_choice": "required", "max_tokens": 5}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code in (200, 400), answer.text[:300]


TRAFFIC = (
    (chat, 25),
    (chat_stream, 25),
    (message, 15),
    (response, 15),
    (malformed, 15),
    (leave_stream, 4),
    (deep_schema, 1),
)
"""Clients with their weights."""
