"""The library `openai`: chat, responses and completions."""

import json

import openai
from weather import API, JSON_LIMIT, MODEL, PARAMETERS, QUESTION, TEXT_LIMIT, TOOL, USER, Weather, report

client = openai.OpenAI(base_url=API, api_key="any")
FUNCTION = {"type": "function", **TOOL["function"]}


def chat(messages=(USER,), limit=TEXT_LIMIT, **fields):
    reply = client.chat.completions.create(model=MODEL, messages=list(messages), max_tokens=limit, **fields)
    return reply.choices[0].message


def chat_pieces():
    chunks = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=TEXT_LIMIT, stream=True)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def chat_stream(messages=(USER,), **fields):
    with client.chat.completions.stream(
        model=MODEL, messages=list(messages), max_tokens=TEXT_LIMIT, **fields
    ) as stream:
        return stream.get_final_completion().choices[0].message


def chat_tool(ask):
    message = ask(tools=[TOOL])
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    sent = {"role": "assistant", **message.model_dump(include={"content", "tool_calls"})}
    for item in sent["tool_calls"]:
        item["function"].pop("parsed_arguments", None)
    return [json.loads(call.function.arguments), ask([USER, sent, result], tools=[TOOL]).content]


def chat_parsed():
    reply = client.chat.completions.parse(model=MODEL, messages=[USER], max_tokens=JSON_LIMIT, response_format=Weather)
    return reply.choices[0].message.parsed.model_dump()


def chat_required():
    return json.loads(chat(limit=JSON_LIMIT, tools=[TOOL], tool_choice="required").tool_calls[0].function.arguments)


def respond(input=QUESTION, limit=TEXT_LIMIT, **fields):
    return client.responses.create(model=MODEL, input=input, max_output_tokens=limit, **fields)


def respond_stream(input=QUESTION, **fields):
    with client.responses.stream(model=MODEL, input=input, max_output_tokens=TEXT_LIMIT, **fields) as stream:
        *_, last = stream
    return last.response  # `get_final_response` raises an error if the limit cuts the text off


def called(response):
    (call,) = [item for item in response.output if item.type == "function_call"]
    return call


def respond_tool(ask):
    first = ask(tools=[FUNCTION])
    call = called(first)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    items = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in first.output]
    return [json.loads(call.arguments), ask([USER, *items, result], tools=[FUNCTION]).output_text]


def respond_reasoning():
    (item,) = [item for item in respond().output if item.type == "reasoning"]
    return item.content[0].text


def respond_required():
    response = respond(limit=JSON_LIMIT, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False)
    return json.loads(called(response).arguments)


def respond_parsed():
    response = client.responses.parse(model=MODEL, input=QUESTION, max_output_tokens=JSON_LIMIT, text_format=Weather)
    return response.output_parsed.model_dump()


def complete(**fields):
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS}}}
    reply = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=JSON_LIMIT, extra_body=schema, **fields)
    return json.loads(reply.choices[0].text)


report(
    chat={
        "text": lambda: chat().content,
        "stream": chat_pieces,
        "reasoning": lambda: chat().model_extra["reasoning_content"],
        "tool": lambda: chat_tool(chat),
        "streamed_tool": lambda: chat_tool(chat_stream),
        "required": chat_required,
        "structured": chat_parsed,
    },
    responses={
        "text": lambda: respond().output_text,
        "stream": lambda: respond_stream().output_text,
        "reasoning": respond_reasoning,
        "tool": lambda: respond_tool(respond),
        "streamed_tool": lambda: respond_tool(respond_stream),
        "required": respond_required,
        "structured": respond_parsed,
    },
    completions={"structured": complete},
)
