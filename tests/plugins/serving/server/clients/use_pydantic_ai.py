"""Agents of Pydantic AI: chat and responses."""

import asyncio

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import API, JSON_LIMIT, MODEL, QUESTION, TEXT_LIMIT, Weather, get_weather, last_call, report

provider = OpenAIProvider(base_url=API, api_key="any")


def agent(model, limit=TEXT_LIMIT, **options):
    return Agent(model(MODEL, provider=provider), model_settings={"max_tokens": limit}, **options)


async def streamed(agent):
    async with agent.run_stream_events(QUESTION) as events:
        *_, last = [event async for event in events]
    return last.result.output


def reasoning(model):
    parts = [part for message in agent(model).run_sync(QUESTION).all_messages() for part in message.parts]
    (part,) = [part for part in parts if part.part_kind == "thinking"]
    return part.content or part.provider_details["raw_content"][0]


def structured(model, output):
    return agent(model, JSON_LIMIT, output_type=output).run_sync(QUESTION).output.model_dump()


def cases(model):
    return {
        "text": lambda: agent(model).run_sync(QUESTION).output,
        "stream": lambda: asyncio.run(streamed(agent(model))),
        "reasoning": lambda: reasoning(model),
        "tool": lambda: last_call(agent(model, tools=[get_weather]).run_sync(QUESTION).output),
        "streamed_tool": lambda: last_call(asyncio.run(streamed(agent(model, tools=[get_weather])))),
        "required": lambda: structured(model, Weather),
        "structured": lambda: structured(model, NativeOutput(Weather)),
    }


report(chat=cases(OpenAIChatModel), responses=cases(OpenAIResponsesModel))
