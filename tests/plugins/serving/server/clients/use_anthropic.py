"""The library `anthropic`: messages."""

import anthropic
from weather import (
    JSON_LIMIT,
    MODEL,
    PARAMETERS,
    QUESTION,
    TEXT_LIMIT,
    URL,
    USER,
    Weather,
    get_weather,
    last_call,
    report,
)

client = anthropic.Anthropic(base_url=URL, api_key="any")
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}


def ask(messages=(USER,), limit=TEXT_LIMIT, **fields):
    return client.messages.create(model=MODEL, messages=list(messages), max_tokens=limit, **fields)


def streamed(messages=(USER,), **fields):
    with client.messages.stream(model=MODEL, messages=list(messages), max_tokens=TEXT_LIMIT, **fields) as stream:
        return stream.get_final_message()


def block(message, kind):
    (block,) = [block for block in message.content if block.type == kind]
    return block


def tool(ask):
    first = ask(tools=[TOOL])
    call = block(first, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    content = [block.model_dump(exclude_none=True) for block in first.content]
    messages = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    return [call.input, block(ask(messages, tools=[TOOL]), "text").text]


def required():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return block(ask(limit=JSON_LIMIT, tools=[TOOL], tool_choice=choice), "tool_use").input


def parsed():
    reply = client.messages.parse(model=MODEL, messages=[USER], max_tokens=JSON_LIMIT, output_format=Weather)
    return reply.parsed_output.model_dump()


def run_tools():
    tools = [anthropic.beta_tool(get_weather)]
    runner = client.beta.messages.tool_runner(model=MODEL, messages=[USER], max_tokens=TEXT_LIMIT, tools=tools)
    return last_call(block(list(runner)[-1], "text").text)


report(
    messages={
        "text": lambda: block(ask(), "text").text,
        "stream": lambda: block(streamed(), "text").text,
        "reasoning": lambda: block(ask(), "thinking").thinking,
        "tool": lambda: tool(ask),
        "streamed_tool": lambda: tool(streamed),
        "required": required,
        "structured": parsed,
    },
    runner={"tool": run_tools},
    count={"tokens": lambda: client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens - len(QUESTION)},
)
