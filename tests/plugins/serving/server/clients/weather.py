"""What the scripts of the Python clients share: the server's address, a tool, a schema, and the report.

A script prints a JSON object: way of calling the server -> kind of request -> result. Its arguments choose the kinds.
"""

import json
import os
import sys
from typing import Literal

import pydantic

URL = os.environ["SERVER_URL"]
API = f"{URL}/v1"
MODEL = "tiny"
TEXT_LIMIT = int(os.environ["TEXT_LIMIT"])
"""Maximum number of tokens of a text."""
JSON_LIMIT = 1500
"""Maximum number of tokens of JSON, which ends long before."""
QUESTION = "Weather?"
USER = {"role": "user", "content": QUESTION}


class Weather(pydantic.BaseModel, extra="forbid"):
    """A schema with short values and no other fields, so that a random model ends its JSON."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


PARAMETERS = Weather.model_json_schema()
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}
CALLS: list[dict] = []
"""Arguments of the calls of `get_weather`."""


def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Return the weather."""
    CALLS.append({"city": city, "days": days})
    return "sun"


def last_call(answer):
    """Return the arguments of the only call since the last one, and the answer."""
    (arguments,) = CALLS
    CALLS.clear()
    return [arguments, answer]


def report(**ways):
    """Print the results of the functions: way -> kind -> function."""
    kinds = sys.argv[1:]
    results = {way: {kind: cases[kind]() for kind in kinds if kind in cases} for way, cases in ways.items()}
    print(json.dumps(results))
