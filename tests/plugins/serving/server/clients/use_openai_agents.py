"""Agents of OpenAI's Agents SDK: chat and responses."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from weather import API, CALLS, JSON_LIMIT, MODEL, QUESTION, TEXT_LIMIT, Weather, get_weather, last_call, report

set_tracing_disabled(True)
weather = function_tool(get_weather)


def agent(model, limit=TEXT_LIMIT, choice=None, **options):
    settings = ModelSettings(max_tokens=limit, tool_choice=choice)
    library = openai.AsyncOpenAI(base_url=API, api_key="any")
    return Agent(name="assistant", model=model(MODEL, library), model_settings=settings, **options)


async def streamed(agent):
    result = Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


def run(agent):
    return Runner.run_sync(agent, QUESTION).final_output


def reasoning(model):
    items = Runner.run_sync(agent(model), QUESTION).new_items
    (item,) = [item.raw_item for item in items if item.type == "reasoning_item"]
    return (item.content or item.summary)[0].text


def required(model):
    run(agent(model, JSON_LIMIT, "required", tools=[weather], tool_use_behavior="stop_on_first_tool"))
    arguments = CALLS[0]
    CALLS.clear()
    return arguments


def cases(model):
    return {
        "text": lambda: run(agent(model)),
        "stream": lambda: asyncio.run(streamed(agent(model))),
        "reasoning": lambda: reasoning(model),
        "tool": lambda: last_call(run(agent(model, tools=[weather]))),
        "streamed_tool": lambda: last_call(asyncio.run(streamed(agent(model, tools=[weather])))),
        "required": lambda: required(model),
        "structured": lambda: run(agent(model, JSON_LIMIT, output_type=Weather)).model_dump(),
    }


report(chat=cases(OpenAIChatCompletionsModel), responses=cases(OpenAIResponsesModel))
