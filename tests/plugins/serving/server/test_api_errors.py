"""Errors name the path of the invalid field as the client wrote it."""

import json

import pytest

from axlearn_plugins_serving.server.anthropic_schemas import MessagesRequest
from axlearn_plugins_serving.server.api_errors import ApiError, parse_body
from axlearn_plugins_serving.server.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
    TokenizeRequest,
)

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
        (ChatRequest, {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
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
    assert error.message.startswith((f"{path}: ", f"{path} should ", f"{path} is "))


FLAT_CHOICE = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (ChatRequest, {"response_format": {"type": "json"}},
         "response_format should have the type 'text', 'json_object' or 'json_schema'; got {\"type\": \"json\"}"),
        (ChatRequest, {"tool_choice": "any"},
         "tool_choice should be 'auto', 'none' or 'required' or have the type 'function' or 'allowed_tools'; got \"any\""),
        (ChatRequest, {"tool_choice": FLAT_CHOICE}, "tool_choice.function is required"),
        (ChatRequest, {"tools": [FLAT_CHOICE]}, "tools[0].function is required"),
        (ChatRequest, {"tools": [{"type": "web_search"}]}, "tools[0].type should be 'function'; got \"web_search\""),
        (ChatRequest, {"tools": [TOOL, TOOL]}, "tools[1].function.name is 'f', as in tools[0]; rename one of the tools"),
        (ChatRequest, {"functions": [TOOL]}, "unknown field 'functions'; send tools instead"),
        (ChatRequest, {"guided_regex": "a"}, "unknown field 'guided_regex'; send structured_outputs instead"),
        (ChatRequest, {"messages": []}, "messages should have at least 1 item; got []"),
        (ChatRequest, {"stop": ""}, "stop should have at least 1 character or be a valid array; got \"\""),
        (ChatRequest, {"temperature": "hot"}, "temperature should be a valid number; got \"hot\""),
        (ResponseRequest, {"tools": [{"type": "web_search"}]}, "tools[0].type should be 'function'; got \"web_search\""),
        (ResponseRequest, {"tools": [TOOL]}, "tools[0].name is required"),
        (ResponseRequest, {"conversation": "c"}, "conversation is not supported; remove it"),
        (ResponseRequest, {"text": {"verbosity": "low"}}, "text.verbosity should be 'medium'; got \"low\""),
        (MessagesRequest, {"max_tokens": None}, "max_tokens is required"),
    ],
)  # fmt: skip
def test_messages_are_sentences_about_the_field(model, fields, message):
    base = {"input": "a"} if model is ResponseRequest else {"messages": [USER], "max_tokens": 1}
    assert reject(model, **{**base, **fields}).message == message


CALL_IN_CHAT = {"id": "c", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"a": NaN}', "the arguments are not JSON: NaN is not a number of JSON"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "the arguments are nested too deeply"),
        ("[1]", "the arguments are not a JSON object"),
    ],
)
def test_arguments_of_earlier_calls_must_be_json(arguments, reason):
    call = {**CALL_IN_CHAT, "function": {"name": "f", "arguments": arguments}}
    path = "messages[0].tool_calls[0].function.arguments"
    error = reject(ChatRequest, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert (error.param, error.message) == (path, f"{path}: {reason}")
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert reject(ResponseRequest, input=[item]).message == f"input[0].arguments: {reason}"


@pytest.mark.parametrize(
    ("model", "fields", "hint"),
    [
        (ChatRequest, {"prompt": "a"}, "; send messages instead"),
        (ChatRequest, {"max_output_tokens": 1}, "; send max_tokens instead"),
        (ChatRequest, {"logprob": True}, "; did you mean logprobs?"),
        (ChatRequest, {"topP": 1}, "; did you mean top_p?"),
        (ChatRequest, {"maxTokens": 1}, "; did you mean max_tokens?"),
        (ChatRequest, {"web_search_options": {}}, ""),
        (CompletionRequest, {"stop_sequences": ["a"]}, "; send stop instead"),
        (CompletionRequest, {"reasoning_effort": "low"}, ""),
        (CompletionRequest, {"repeat_penalty": 1.1}, "; send repetition_penalty instead"),
        (ResponseRequest, {"stop": "a"}, ""),
        (ResponseRequest, {"max_tool_calls": 1}, ""),
        (ResponseRequest, {"response_format": {"type": "text"}}, "; send text.format instead"),
        (ResponseRequest, {"reasoning_effort": "low"}, "; send reasoning.effort instead"),
        (MessagesRequest, {"stop": ["a"]}, "; send stop_sequences instead"),
        (MessagesRequest, {"output_format": {}}, "; send output_config.format instead"),
    ],
)
def test_hints_name_the_field_of_this_api_or_nothing(model, fields, hint):
    base = {ResponseRequest: {"input": "a"}, CompletionRequest: {"prompt": "a"}}
    error = reject(model, **{**base.get(model, {"messages": [USER], "max_tokens": 1}), **fields})
    assert error.message == f"unknown field {next(iter(fields))!r}{hint}"


@pytest.mark.parametrize(
    ("model", "fields", "path", "close"),
    [
        (
            ChatRequest,
            {"stream": True, "stream_options": {"includeUsage": True}},
            "stream_options.includeUsage",
            "include_usage",
        ),
        (ChatRequest, {"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"names": "a"}}},
            "json_schema.names",
            "name",
        ),
        (ResponseRequest, {"input": "a", "reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (ResponseRequest, {"input": "a", "reasoning": {"zebra": 1}}, "reasoning.zebra", None),
        (ChatRequest, {"response_format": {"type": "json_object", "json_schema": {}}}, "json_schema", None),
        (ChatRequest, {"response_format": {"type": "text", "schema": {}}}, "schema", None),
        (ResponseRequest, {"input": "a", "text": {"format": {"type": "json_object", "name": "x"}}}, "name", None),
    ],
)
def test_hints_for_fields_of_objects(model, fields, path, close):
    base = {} if model is ResponseRequest else {"messages": [USER]}
    error = reject(model, **{**base, **fields})
    assert error.param.endswith(path)
    assert error.message == f"unknown field {error.param!r}" + (f"; did you mean {close}?" if close else "")


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (ResponseRequest, {"messages": [USER]}, "unknown field 'messages'; send input instead"),
        (CompletionRequest, {"promt": "a"}, "unknown field 'promt'; did you mean prompt?"),
        (EmbeddingRequest, {"inputs": ["a"]}, "unknown field 'inputs'; send input instead"),
        (CompletionRequest, {"tools": []}, "prompt is required"),
        (ChatRequest, {"input": "a", "zebra": 1}, "unknown field 'input'; send messages instead (and 1 more wrong field)"),
    ],
)  # fmt: skip
def test_a_field_with_another_name_is_not_just_missing(model, fields, message):
    assert reject(model, **fields).message == message


def test_keys_of_the_logit_bias_are_token_ids():
    error = reject(CompletionRequest, prompt="a", logit_bias={"hello": 1})
    assert error.message == "logit_bias.hello: the keys are token ids, such as '1234'"
    assert parse_body(CompletionRequest, b'{"prompt": "a", "logit_bias": {"0": 1, "1234": -1}}').logit_bias


def test_messages_about_the_body():
    assert reject(ChatRequest).message == "messages is required"
    for text, message in (
        ("[]", "the body should be an object; got []"),
        ("{", "the body is not JSON: EOF while parsing"),
        ('{"messages": ' + "[" * 500 + "]" * 500 + "}", "the arrays and objects of the body are nested too deeply"),
    ):
        with pytest.raises(ApiError) as caught:
            parse_body(ChatRequest, text.encode())
        assert caught.value.message.startswith(message)


def test_defaults_of_the_api_are_accepted():
    assert (
        parse_body(ChatRequest, json.dumps({"messages": [USER], "verbosity": "medium"}).encode()).verbosity == "medium"
    )
    assert parse_body(ResponseRequest, b'{"input": "a", "text": {"verbosity": "medium"}}').text is not None


def test_messages_name_what_models_cannot_read():
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    error = reject(ChatRequest, messages=[{"role": "user", "content": [audio]}])
    assert "the message has audio, but this model reads only text" in error.message
    assert "the message has an image" in reject(ResponseRequest, input=[IMAGE]).message


@pytest.mark.parametrize(
    ("model", "fields", "path"),
    [
        (ChatRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (ChatRequest, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CompletionRequest, {"best_of": 2}, "best_of"),
        (CompletionRequest, {"grammar": "start: A", "response_format": {"type": "json_object"}}, "grammar"),
        (ResponseRequest, {"background": True, "stream": True}, "background"),
        (ResponseRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (TokenizeRequest, {"prompt": "a", "tools": [TOOL]}, "tools"),
        (TokenizeRequest, {}, "messages"),
        (TokenizeRequest, {"prompt": "a", "messages": [USER]}, "messages"),
        (
            TokenizeRequest,
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_errors_about_several_fields_name_one_of_them(model, fields, path):
    base = {ChatRequest: {"messages": [USER]}, CompletionRequest: {"prompt": "a"}, ResponseRequest: {"input": "a"}}
    error = reject(model, **{**base.get(model, {}), **fields})
    assert (error.param, error.code) == (path, "value_error")
    assert path.rpartition(".")[2] in error.message
