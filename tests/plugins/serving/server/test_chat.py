"""Tool calls and reasoning over `/v1/chat/completions`, read by the official client."""

import json

import httpx
import pytest

from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.fake_engine import FakeEngine
from support.scripted_models import WEATHER, hermes_template, prompt_of
from support.server_thread import serving

USER = {"role": "user", "content": "Weather in Köln?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"Süd\\"", "days": 2}}\n</tool_call>'
ANSWER = "It rains."


def script(request):
    """Reason and call the tool, then answer after its result."""
    prompt = prompt_of(request)
    thinks = "" if prompt.endswith("</think>\n\n") else "<think>\nLook it up.\n</think>\n\n"
    calls = "Tools:" in prompt and "<|tool|>" not in prompt
    return list((thinks + (f"Let me see.\n{CALL}" if calls else ANSWER)).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = hermes_template(tmp_path_factory.mktemp("template"))
    with serving(FakeEngine(script=script, max_context=4096), template=template) as server:
        yield server


@pytest.fixture
def client(server):
    import openai  # takes half a second, so not while tests are collected

    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def ask(client, messages=(USER,), **options):
    return client.chat.completions.create(model="tiny", messages=list(messages), tools=[WEATHER], **options)


def test_a_model_reasons_and_calls_a_tool(client, server):
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert choice.message.model_extra["reasoning_content"] == "Look it up."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": 'Köln "Süd"', "days": 2},
    )
    assert call.id.startswith("call_")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    last = ask(client, (USER, choice.message.model_dump(), result)).choices[0]
    assert (last.message.content, last.finish_reason) == (ANSWER, "stop")
    prompt = prompt_of(server.engine.seen[-1])
    assert "<|assistant|><think>Look it up.</think>Let me see.\n<tool_call>" in prompt
    assert '"arguments": {"city": "Köln \\"Süd\\"", "days": 2}' in prompt


def test_a_stream_has_the_same_parts(client):
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[WEATHER]) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    whole = ask(client).choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.model_extra.get("reasoning_content", "") for d in deltas) == "Look it up."
    assert final.message.content == whole.message.content
    assert final.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments
    assert final.finish_reason == "tool_calls"
    pieces = [d.tool_calls[0].function.arguments for d in deltas if d.tool_calls]
    assert len(pieces) > 5  # the arguments stream
    assert deltas[0].role == "assistant"


def test_usage_counts_the_tokens_of_the_reasoning(client):
    usage = ask(client).usage
    assert usage.completion_tokens_details.reasoning_tokens >= len("Look it up.")
    assert usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens / 2


def test_the_reasoning_can_be_switched_off(client, server):
    for options in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = ask(client, **options).choices[0].message
        assert "reasoning_content" not in message.model_extra
        assert prompt_of(server.engine.seen[-1]).endswith("<think>\n\n</think>\n\n")
    hidden = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert (hidden.content, hidden.model_extra) == ("Let me see.\n", {})


def test_tools_are_not_offered_if_the_choice_is_none(client, server):
    assert ask(client, tool_choice="none").choices[0].message.content == ANSWER
    assert "Tools:" not in prompt_of(server.engine.seen[-1])


def test_only_allowed_tools_are_offered(client, server):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    body = {
        "messages": [USER],
        "tools": [WEATHER, other],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"].endswith(CALL)  # a call to another tool stays text
    assert "get_weather" not in prompt_of(server.engine.seen[-1])


def test_continuing_the_last_message(client, server):
    messages = [USER, {"role": "assistant", "content": "It "}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    assert prompt_of(server.engine.seen[-1]).endswith("<|assistant|>It")


def test_unknown_fields_of_messages_are_ignored_and_logged_once(server, caplog):
    message = {**USER, "reasoning_details": [], "cache_control": {"type": "ephemeral"}}
    body = {"messages": [message], "tools": [], "stop": [], "tool_choice": None}
    for _ in range(2):
        assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200
    assert sum("cache_control" in record.message for record in caplog.records) == 1


def test_logprobs_of_a_stream_with_reasoning_cover_every_token(client):
    options = {"messages": [USER], "logprobs": True, "model": "tiny"}
    chunks = list(client.chat.completions.create(stream=True, **options))
    streamed = [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert streamed == [t.token for t in whole]
    assert "".join(streamed) == "<think>\nLook it up.\n</think>\n\n" + ANSWER


NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """Run a server whose model always wants to write the same text, as far as the grammar allows it."""
    template = hermes_template(tmp_path_factory.mktemp("template"))

    def wishes(request):
        prompt = prompt_of(request)
        if "think!" in prompt:
            return list(b"<think>hm</think>\n\nyes, sure")
        if "forever!" in prompt:
            return list(b"<think>" + b"z" * 4000)
        if "json!" in prompt:
            return list(b'"no"')
        if "call!" in prompt:
            return list(CALL.encode())
        return list(b'{"city": "a"}' + b"}" * 100)

    with serving(FakeEngine(script=wishes, max_context=8192), template=template) as server:
        yield server


def post(server, text, **fields):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, **fields}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("text", ["a", "think!"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_matches_the_schema(eager, text, choice):
    answer = post(eager, text, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert answer["message"].get("reasoning_content") == ("hm" if text == "think!" else None)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert answer["message"]["content"] is None
    if answer["finish_reason"] == "tool_calls":  # else the output was cut off
        assert set(json.loads(call["function"]["arguments"])) <= {"city", "days"}
    assert call["function"]["arguments"].startswith("{")


@pytest.mark.parametrize("text", ["json!", "think!"])
def test_json_follows_the_reasoning(eager, text):
    message = post(eager, text, response_format=SCHEMA)["message"]
    assert json.loads(message["content"]) in ("yes", "no")
    assert message.get("reasoning_content") == ("hm" if text == "think!" else None)


def test_a_model_may_call_a_tool_instead_of_answering_in_json(eager):
    fields = {"tools": [WEATHER], "response_format": SCHEMA}
    assert post(eager, "call!", **fields)["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert json.loads(post(eager, "json!", **fields)["message"]["content"]) in ("yes", "no")


def test_a_budget_ends_the_reasoning(eager):
    answer = post(eager, "forever!", thinking_token_budget=20, response_format=SCHEMA)
    assert answer["message"]["reasoning_content"] == "z" * 14 + "z" * 6
    assert json.loads(answer["message"]["content"]) in ("yes", "no")


def test_a_schema_that_cannot_be_met_names_the_tool(eager):
    schema = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    function = {"name": "impossible", "parameters": schema}
    messages, required = {"messages": [USER]}, {"tool_choice": "required"}
    requests = {
        "/v1/chat/completions": {
            **messages,
            **required,
            "tools": [WEATHER, {"type": "function", "function": function}],
        },
        "/v1/responses": {"input": "a", **required, "tools": [{"type": "function", **function}]},
        "/v1/messages": {
            **messages,
            "max_tokens": 9,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "impossible", "input_schema": schema}],
        },
    }
    errors = [httpx.post(eager.url + path, json=body) for path, body in requests.items()]
    assert [error.status_code for error in errors] == [400, 400, 400]
    paths = ["tools[1].function.parameters", "tools[0].parameters", "tools[0].input_schema"]
    for error, path in zip(errors, paths, strict=True):
        message = f"{path}: the parameters of the tool 'impossible' cannot be used: Unsatisfiable schema"
        assert error.json()["error"]["message"].startswith(message)


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|channel|>commentary<|end|>{% endif %}"
    "<|start|>assistant"
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """Run a server whose model writes like gpt-oss."""
    path = tmp_path_factory.mktemp("template") / "harmony.jinja"
    path.write_text(HARMONY + "{# <|channel|>analysis<|message|><|return|><|call|> #}")

    def writes(request):
        prompt = prompt_of(request)
        thinks = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        if "json!" in prompt:
            return list((thinks + '<|channel|>final<|message|>"no"').encode())
        if "commentary" in prompt:
            call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
            return list((thinks + call).encode())
        return list((thinks + "<|channel|>final<|message|>Sun.<|return|>").encode())

    template = ChatTemplate.Config(path=str(path)).build(tokenizer=ByteTokenizer.Config().build())
    parsers = {"tool_parser": "harmony", "reasoning_parser": "harmony"}
    with serving(FakeEngine(script=writes, max_context=8192), template=template, **parsers) as server:
        yield server


def test_the_channels_of_harmony(harmony):
    answer = post(harmony, "Hi")["message"]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Sun.")
    called = post(harmony, "Hi", tools=[WEATHER])
    assert (called["message"]["content"], called["finish_reason"]) == (None, "tool_calls")
    assert called["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    for fields in ({}, {"thinking_token_budget": 1}):
        message = post(harmony, "json!", response_format=SCHEMA, **fields)["message"]
        assert json.loads(message["content"]) in ("yes", "no")


def test_only_the_first_call_is_returned_if_calls_are_not_parallel(tmp_path):
    with serving(
        FakeEngine(script=list((CALL + CALL).encode()), max_context=4096), template=hermes_template(tmp_path)
    ) as server:
        assert len(post(server, "a", tools=[WEATHER])["message"]["tool_calls"]) == 2
        assert len(post(server, "a", tools=[WEATHER], parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_fields_that_change_nothing_are_accepted(server):
    fields = {
        "store": True,
        "functions": [],
        "length_penalty": 1.0,
        "use_beam_search": False,
        "reasoning_effort": "medium",
    }
    assert post(server, "a", cache_prompt=True, request_id="x", documents=[], **fields)["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("field", ["structured_outputs", "json_schema", "grammar"])
def test_a_required_call_leaves_no_text_to_constrain(server, choice, field):
    value = {"structured_outputs": {"regex": "a"}, "json_schema": {}, "grammar": "start: A"}[field]
    body = {"messages": [USER], "tools": [WEATHER], "tool_choice": choice, field: value}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "requires a call, so there is no text to constrain" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": " "}, {"arguments": {}}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_call_without_arguments_in_the_history_has_none(server, path, arguments):
    if path == "/v1/responses":
        item = {"type": "function_call", "call_id": "c", "name": "get_weather", **arguments}
        body = {"input": [USER, item, {"type": "function_call_output", "call_id": "c", "output": "rain"}]}
    else:
        call = {"id": "c", "type": "function", "function": {"name": "get_weather", **arguments}}
        result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
        body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, result]}
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert '{"name": "get_weather", "arguments": {}}' in prompt_of(server.engine.seen[-1])


def test_tokenize_continues_the_last_message(server):
    messages = [USER, {"role": "assistant", "content": "It "}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
    httpx.post(server.url + "/v1/chat/completions", json=body)
    assert tokens == list(server.engine.seen[-1].prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
        {"reasoning_effort": "none"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_tokenize_gives_the_prompt_of_chat_completions(server, fields):
    body = {"messages": [USER], **fields}
    tokens = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
    httpx.post(server.url + "/v1/chat/completions", json=body)
    assert tokens == list(server.engine.seen[-1].prompt)


@pytest.mark.parametrize("name", ["tool_choice", "reasoning_effort"])
def test_tokenize_needs_messages_for_fields_of_conversations(server, name):
    answer = httpx.post(server.url + "/tokenize", json={"prompt": "a", name: "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert httpx.post(server.url + "/tokenize", json={"prompt": "a", name: None}).status_code == 200
