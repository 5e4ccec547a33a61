"""`InferenceClient` of huggingface_hub."""

import json

from huggingface_hub import InferenceClient
from weather import JSON_LIMIT, MODEL, PARAMETERS, TEXT_LIMIT, TOOL, URL, USER, report

client = InferenceClient(base_url=URL, api_key="any")
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS}}


def ask(messages=(USER,), limit=TEXT_LIMIT, **fields):
    reply = client.chat_completion(list(messages), model=MODEL, max_tokens=limit, **fields)
    return reply.choices[0].message


def deltas(**fields):
    chunks = client.chat_completion([USER], model=MODEL, max_tokens=TEXT_LIMIT, stream=True, **fields)
    return [choice.delta for chunk in chunks for choice in chunk.choices]


def tool():
    first = ask(tools=[TOOL])
    (call,) = first.tool_calls
    function = {"name": call.function.name, "arguments": call.function.arguments}
    sent = {
        "role": "assistant",
        "content": first.content,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    return [json.loads(call.function.arguments), ask([USER, sent, result], tools=[TOOL]).content]


def streamed_call():
    calls = [call for delta in deltas(tools=[TOOL]) for call in delta.tool_calls or ()]
    return json.loads("".join(call.function.arguments or "" for call in calls))


def required():
    return json.loads(ask(limit=JSON_LIMIT, tools=[TOOL], tool_choice="required").tool_calls[0].function.arguments)


report(
    chat={
        "text": lambda: ask().content,
        "stream": lambda: "".join(delta.content or "" for delta in deltas()),
        "reasoning": lambda: ask()["reasoning_content"],
        "tool": tool,
        "streamed_call": streamed_call,
        "required": required,
        "structured": lambda: json.loads(ask(limit=JSON_LIMIT, response_format=FORMAT).content),
    }
)
