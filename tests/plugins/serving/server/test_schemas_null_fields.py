"""Null fields count as absent in every part of every request; other values are validated."""

import httpx
import pytest
from pydantic import ValidationError

from axlearn_plugins_serving.server import anthropic_schemas, message_schemas, response_items, schemas
from axlearn_plugins_serving.server.message_schemas import MessagePart
from support.fake_engine import FakeEngine
from support.server_thread import serving

USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "arguments": "{}"}
SCHEMA = {"name": "s", "schema": {"type": "object", "default": None}}
NAMED = {"type": "function", "function": {"name": "f"}}
MODULES = tuple(module.__name__ for module in (schemas, message_schemas, response_items, anthropic_schemas))
SMALLEST = {
    schemas.StreamOptions: {},
    schemas.JsonSchema: SCHEMA,
    schemas.TextFormat: {"type": "text"},
    schemas.JsonObjectFormat: {"type": "json_object"},
    schemas.JsonSchemaFormat: {"type": "json_schema", "json_schema": SCHEMA},
    schemas.SamplingFields: {},
    schemas.CompletionRequest: {"prompt": "a"},
    message_schemas.TextPart: {"type": "text", "text": "a"},
    message_schemas.FunctionCall: FUNCTION,
    message_schemas.ToolCall: {"id": "c", "function": FUNCTION},
    message_schemas.Message: USER,
    message_schemas.FunctionDefinition: {"name": "f"},
    message_schemas.Tool: {"type": "function", "function": {"name": "f", "parameters": {"default": None}}},
    message_schemas.FunctionName: {"name": "f"},
    message_schemas.NamedTool: NAMED,
    message_schemas.AllowedToolList: {"mode": "auto", "tools": [NAMED]},
    message_schemas.AllowedTools: {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    schemas.ChatRequest: {"messages": [USER]},
    response_items.InputMessage: USER,
    response_items.FunctionCallItem: {"type": "function_call", "call_id": "c", "name": "f"},
    response_items.FunctionOutputItem: {"type": "function_call_output", "call_id": "c", "output": "1"},
    response_items.ReasoningText: {"type": "reasoning_text", "text": "a"},
    response_items.ReasoningItem: {"type": "reasoning"},
    response_items.ItemReference: {"type": "item_reference", "id": "msg_1"},
    schemas.ResponseJsonSchema: {"type": "json_schema", **SCHEMA},
    schemas.ResponseText: {},
    schemas.ResponseTool: {"type": "function", "name": "f"},
    schemas.ResponseToolName: {"type": "function", "name": "f"},
    schemas.ResponseAllowedTools: {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    },
    schemas.ReasoningOptions: {},
    schemas.EmbeddingRequest: {"input": "a"},
    schemas.LoadAdapterRequest: {"lora_name": "a", "lora_path": "b"},
    schemas.UnloadAdapterRequest: {"lora_name": "a"},
    schemas.ResponseInput: {"input": "a"},
    schemas.ResponseInputTokens: {"input": "a"},
    schemas.ResponseRequest: {"input": "a"},
    schemas.TokenizeRequest: {"prompt": "a"},
    schemas.DetokenizeRequest: {"tokens": [1]},
    anthropic_schemas.TextBlock: {"type": "text", "text": "a"},
    anthropic_schemas.ThinkingBlock: {"type": "thinking", "thinking": "a"},
    anthropic_schemas.RedactedThinkingBlock: {"type": "redacted_thinking"},
    anthropic_schemas.ToolUseBlock: {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    schemas.LoadAdapterRequest: {"lora_name": "a", "lora_path": "b"},
    schemas.UnloadAdapterRequest: {"lora_name": "a"},
    anthropic_schemas.ToolResultBlock: {"type": "tool_result", "tool_use_id": "c"},
    anthropic_schemas.AnthropicMessage: USER,
    anthropic_schemas.AnthropicTool: {"name": "f", "input_schema": {"default": None}},
    anthropic_schemas.AnthropicToolChoice: {"type": "auto"},
    anthropic_schemas.Thinking: {"type": "enabled"},
    anthropic_schemas.OutputFormat: {"type": "json_schema", "schema": {"default": None}},
    anthropic_schemas.OutputConfig: {},
    anthropic_schemas.Thread: {"type": "create"},
    anthropic_schemas.RequestMetadata: {},
    anthropic_schemas.MessageTokensRequest: {"messages": [USER]},
    anthropic_schemas.MessagesRequest: {"messages": [USER], "max_tokens": 1},
}
"""A valid body of each schema."""


def every_schema(base=schemas.Body):
    for child in base.__subclasses__():
        if child.__module__ in MODULES:
            yield child
        yield from every_schema(child)


def test_no_schema_is_missing_here():
    assert set(every_schema()) - {MessagePart} == set(SMALLEST)


@pytest.mark.parametrize("model", SMALLEST, ids=lambda model: model.__name__)
def test_null_fields_are_absent(model):
    body = SMALLEST[model]
    right = model.model_validate(body)
    names = {field.alias or name for name, field in model.model_fields.items()} - set(body)
    assert model.model_validate({**body, **dict.fromkeys(names), "nobody_knows_it": None}) == right
    for name, field in model.model_fields.items():
        if field.is_required():
            with pytest.raises(ValidationError, match="Field required"):
                model.model_validate({**body, field.alias or name: None})


@pytest.mark.parametrize("model", SMALLEST, ids=lambda model: model.__name__)
@pytest.mark.parametrize("value", [False, 0, "", [1], {}], ids=repr)
def test_unknown_fields_with_a_value_are_refused_outside_of_messages(model, value):
    if issubclass(model, MessagePart):
        assert model.model_validate({**SMALLEST[model], "nobody_knows_it": value})
        return
    with pytest.raises(ValidationError, match="nobody_knows_it"):
        model.model_validate({**SMALLEST[model], "nobody_knows_it": value})


def test_a_null_keeps_its_meaning_in_what_is_not_a_field():
    assert schemas.JsonSchema.model_validate(SCHEMA).schema_ == SCHEMA["schema"]
    tool = message_schemas.Tool.model_validate(SMALLEST[message_schemas.Tool])
    assert tool.function.parameters == {"default": None}
    assert schemas.CompletionRequest.model_validate({"prompt": "a", "max_tokens": None}).max_tokens == 16  # the default


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(script=list(b"yes"), max_context=512)) as running:
        yield running


def test_the_official_client_sends_back_what_it_got(server):
    """`model_dump` writes every field of a message, and most are null."""
    import openai  # takes half a second, so not while tests are collected

    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        said = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=8).choices[0].message
        dumped = said.model_dump()
        assert None in dumped.values()
        again = client.chat.completions.create(model="tiny", messages=[USER, dumped, USER], max_tokens=8)
        assert again.choices[0].message.content == "yes"
        plain = [USER, {"role": "assistant", "content": "yes"}, USER]
        assert server.engine.seen[-1].prompt == tuple(server.service.text.encode_chat(plain))
        response = client.responses.create(model="tiny", input="a", max_output_tokens=8)
        items = [USER, *(item.model_dump() for item in response.output), USER]
        assert client.responses.create(model="tiny", input=items, max_output_tokens=8).output_text == "yes"


def test_an_assistant_that_called_a_tool(server):
    call = {"id": "c", "type": "function", "function": {**FUNCTION, "parsed_arguments": None}, "index": None}
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "content", "parsed"))
    messages = [
        USER,
        {"role": "assistant", **nulls, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1", "name": None},
    ]
    body = {"messages": messages, "max_tokens": 8, "tools": None, "logit_bias": None, "functions": None}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    messages[1]["audio"] = {"id": "x"}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert refused["message"] == "messages[1]: 'audio' is not supported; this model reads only text"
