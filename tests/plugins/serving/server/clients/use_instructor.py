"""Instructor in the modes that OpenAI's client has."""

import instructor
import openai
from weather import API, JSON_LIMIT, MODEL, USER, Weather, report

library = openai.OpenAI(base_url=API, api_key="any")


def structured(mode):
    client = instructor.from_openai(library, mode=mode)
    limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    fields = {"model": MODEL, "messages": [USER], "max_retries": 0, limit: JSON_LIMIT}
    return client.chat.completions.create(response_model=Weather, **fields).model_dump()


def partial():
    client = instructor.from_openai(library, mode=instructor.Mode.TOOLS)
    pieces = client.chat.completions.create_partial(
        response_model=Weather, model=MODEL, messages=[USER], max_retries=0, max_tokens=JSON_LIMIT
    )
    return list(pieces)[-1].model_dump()


report(
    tools={"structured": lambda: structured(instructor.Mode.TOOLS), "streamed_structured": partial},
    json_schema={"structured": lambda: structured(instructor.Mode.JSON_SCHEMA)},
    json={"structured_without_schema": lambda: structured(instructor.Mode.JSON)},
    responses={"structured": lambda: structured(instructor.Mode.RESPONSES_TOOLS)},
)
