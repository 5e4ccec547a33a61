"""LiteLLM with the provider `openai/`."""

import json

import litellm
from weather import API, JSON_LIMIT, MODEL, TEXT_LIMIT, TOOL, USER, Weather, report


def ask(messages=(USER,), limit=TEXT_LIMIT, **fields):
    return litellm.completion(
        model=f"openai/{MODEL}", messages=list(messages), api_base=API, api_key="any", max_tokens=limit, **fields
    )


def message(*args, **fields):
    return ask(*args, **fields).choices[0].message


def streamed(*args, **fields):
    return litellm.stream_chunk_builder(list(ask(*args, stream=True, **fields))).choices[0].message


def tool(ask):
    first = ask(tools=[TOOL])
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    return [json.loads(call.function.arguments), ask([USER, first.model_dump(), result], tools=[TOOL]).content]


def required():
    calls = message(limit=JSON_LIMIT, tools=[TOOL], tool_choice="required").tool_calls
    return json.loads(calls[0].function.arguments)


report(
    chat={
        "text": lambda: message().content,
        "stream": lambda: streamed().content,
        "reasoning": lambda: message().reasoning_content,
        "tool": lambda: tool(message),
        "streamed_tool": lambda: tool(streamed),
        "required": required,
        "structured": lambda: json.loads(message(limit=JSON_LIMIT, response_format=Weather).content),
    }
)
