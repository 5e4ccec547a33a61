"""The JSON schemas of tools are checked on all endpoints, even if no call is required."""

import json
import time

import pytest
from pydantic_core import PydanticCustomError

from axlearn_plugins_serving.server.anthropic_schemas import MessagesRequest, MessageTokensRequest
from axlearn_plugins_serving.server.api_errors import ApiError, parse_body
from axlearn_plugins_serving.server.parameter_schemas import check_parameters
from axlearn_plugins_serving.server.schemas import ChatRequest, ResponseInputTokens, ResponseRequest, TokenizeRequest

CITY = {
    "$defs": {"City": {"enum": ["Rome", "Bern"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
}
NESTED = {
    "type": ["object", "null"],
    "properties": {
        "type": {"type": "string", "minLength": 1, "pattern": "a+"},
        "required": {"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": 0.5}, {"const": None}]}},
        "tree": {"$ref": "#"},
        "first": {"$ref": "#/properties/required/items/anyOf/0"},
        "any": True,
        "default": {"type": "object", "default": {"type": 3}, "additionalProperties": {"type": "number"}},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "boolean"}], "additionalItems": False},
    },
    "required": ["type"],
    "additionalProperties": False,
    "x-vendor": {"type": "anything"},
}


@pytest.mark.parametrize(
    "schema", [{}, {"type": "object"}, CITY, NESTED, {"properties": None, "required": None, "type": None}]
)
def test_valid_schemas_are_accepted(schema):
    assert check_parameters(schema) is schema


def array_of(items):
    return {"properties": {"a": {"type": "array", "items": items}}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "type is 'objekt', which is not a type; use array, boolean, "),
        ({"type": "OBJECT"}, "type is 'OBJECT', which is not a type; did you mean 'object'?"),
        ({"type": "string"}, "type is 'string', but arguments are an object; set it to 'object'"),
        ({"type": ["string", "null"]}, "type does not include 'object', but arguments are an object"),
        ({"type": {}}, "type is an object, which is not a type"),
        ({"properties": ["a"]}, "properties should be an object of JSON schemas"),
        ({"properties": {"a": "string"}}, "properties.a should be a JSON schema: an object, true or false"),
        ({"properties": {"a": {"type": "str"}}}, "properties.a.type is 'str', which is not a type"),
        ({"properties": {"a": {"type": []}}}, "properties.a.type should have at least one type"),
        ({"properties": {"a": {"type": "string"}}, "required": "a"}, "required should be a list of names of properties"),
        ({"properties": {"a": {"required": True}}}, "properties.a.required should be a list of names of properties"),
        (array_of({"type": 3}), "properties.a.items.type is 3, which is not a type"),
        (array_of([{"type": "integer"}, 3]), "properties.a.items[1] should be a JSON schema"),
        (array_of({"anyOf": []}), "properties.a.items.anyOf should be a list of JSON schemas"),
        (array_of({"anyOf": [{"type": "x"}]}), "properties.a.items.anyOf[0].type is 'x', which is not a type"),
        (array_of({"enum": "a"}), "properties.a.items.enum should be a list of values"),
        (array_of({"minimum": "1"}), "properties.a.items.minimum should be a number"),
        (array_of({"maxLength": -1}), "properties.a.items.maxLength should be an integer that is not negative"),
        (array_of({"pattern": 1}), "properties.a.items.pattern should be a string"),
        (array_of({"$ref": "#/$defs/City"}), "properties.a.items.$ref is '#/$defs/City', which the schema does not contain"),
        (array_of({"$ref": "#/properties/a/items/anyOf/0"}), "properties.a.items.$ref is '#/properties/a/items/anyOf/0', which"),
        ({"additionalProperties": "no"}, "additionalProperties should be a JSON schema"),
    ],
)  # fmt: skip
def test_the_first_wrong_keyword_is_named(schema, message):
    with pytest.raises(PydanticCustomError) as caught:
        check_parameters(schema)
    assert caught.value.message().startswith(message)


def test_large_schemas_take_linear_time():
    times = []
    for number in (2_000, 20_000):
        schema = {
            "properties": {f"p{i}": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/p0"}]} for i in range(number)}
        }
        start = time.process_time()
        check_parameters(schema)
        times.append(time.process_time() - start)
    assert times[1] < max(0.5, 40 * times[0])


NESTED_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "objekt"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "objekt"}}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("model", "fields", "tool", "path"),
    [
        (ChatRequest, MESSAGES, NESTED_TOOL, "tools[0].function.parameters"),
        (ChatRequest, {**MESSAGES, "tool_choice": "none"}, NESTED_TOOL, "tools[0].function.parameters"),
        (TokenizeRequest, MESSAGES, NESTED_TOOL, "tools[0].function.parameters"),
        (ResponseRequest, {"input": "a"}, FLAT_TOOL, "tools[0].parameters"),
        (ResponseInputTokens, {"input": "a"}, FLAT_TOOL, "tools[0].parameters"),
        (MessagesRequest, {**MESSAGES, "max_tokens": 1}, ANTHROPIC_TOOL, "tools[0].input_schema"),
        (MessageTokensRequest, MESSAGES, ANTHROPIC_TOOL, "tools[0].input_schema"),
    ],
)
def test_every_endpoint_with_tools_checks_them(model, fields, tool, path):
    with pytest.raises(ApiError) as caught:
        parse_body(model, json.dumps({**fields, "tools": [tool]}).encode())
    error = caught.value
    assert (error.status, error.param, error.code) == (400, path, "invalid_function_parameters")
    assert error.message.startswith(f"{path}: type is 'objekt', which is not a type; ")
