"""Errors name the path of the invalid field as the client wrote it."""

import json

import pytest

from axlearn_plugins_serving.server.anthropic_schemas import MessagesRequest
from axlearn_plugins_serving.server.api_errors import ApiError, parse_body
from axlearn_plugins_serving.server.schemas import ChatRequest, ResponseRequest

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": 1}]}


def reject(body, **fields):
    with pytest.raises(ApiError) as caught:
        parse_body(body, json.dumps(fields).encode())
    return caught.value


@pytest.mark.parametrize(
    ("model", "fields", "path"),
    [
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
         "response_format.json_schema.schema"),
        (ChatRequest, {"response_format": {"type": "json"}}, "response_format"),
        (ChatRequest, {"response_format": "json"}, "response_format"),
        (ChatRequest, {"tools": [TOOL, TOOL]}, "tools"),
        (ResponseRequest, {"input": [IMAGE]}, "input[0].content[0]"),
        (ResponseRequest, {"input": [USER, CALL]}, "input[1].arguments"),
        (ResponseRequest, {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}},
         "text.format.schema"),
        (MessagesRequest, {"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0].text"),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text"),
    ],
)  # fmt: skip
def test_the_path_omits_the_kinds_of_objects(model, fields, path):
    base = {"model": "m", "messages": [USER], "max_tokens": 1} if model is not ResponseRequest else {"model": "m"}
    error = reject(model, **{**base, **fields})
    assert (error.status, error.param) == (400, path)
    assert error.message.startswith(f"{path}: ")


def test_an_unknown_kind_of_format_names_the_known_ones():
    error = reject(ChatRequest, messages=[USER], response_format={"type": "json"})
    assert error.message == "response_format: type should be 'text', 'json_object' or 'json_schema'"


def test_messages_name_what_models_cannot_read():
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    error = reject(ChatRequest, messages=[{"role": "user", "content": [audio]}])
    assert "the message has audio, but this model reads only text" in error.message
    assert "the message has an image" in reject(ResponseRequest, input=[IMAGE]).message
