"""`/v1/messages`: tool calls, reasoning, streams and errors in the form of Anthropic's API."""

import json

import httpx
import pytest

from axlearn_plugins_serving.server.limits import ServerLimits
from support.fake_engine import FakeEngine
from support.scripted_models import WEATHER, hermes_template, prompt_of
from support.server_thread import serving

TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
USER = {"role": "user", "content": "Weather?"}
OUTPUT = '<think>\nHm.\n</think>\n\nOne moment.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def script(request):
    prompt = prompt_of(request)
    return list(("Sunny. END more" if "<|tool|>" in prompt or "Tools:" not in prompt else OUTPUT).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = hermes_template(tmp_path_factory.mktemp("template"))
    with serving(FakeEngine(script=script, max_context=4096), template=template) as server:
        yield server


HUGE = {"enum": ["a" * 70_000]}


def post(server, path="/v1/messages", **fields):
    body = {"max_tokens": 200, "messages": [USER], **fields}
    return httpx.post(server.url + path, json=body)


def test_a_tool_is_called_and_its_result_is_read(server):
    first = post(server, tools=[TOOL], system="Be brief.").json()
    thinking, text, call = first["content"]
    assert (thinking["thinking"], text["text"], call["input"]) == ("Hm.", "One moment.", {"city": "Rome"})
    assert (first["stop_reason"], first["type"], first["role"]) == ("tool_use", "message", "assistant")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sun"}]}
    messages = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = post(server, tools=[TOOL], messages=messages, stop_sequences=["END"]).json()
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "Sunny. "}], "stop_sequence")
    assert second["stop_sequence"] == "END"
    prompt = prompt_of(server.engine.seen[-1])
    assert "<think>Hm.</think>One moment.<tool_call>" in prompt
    assert "<|tool|>sun" in prompt
    usage = second["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt.encode())


def test_the_events_of_a_stream(server):
    lines = post(server, tools=[TOOL], stream=True).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    deltas = {}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            deltas[kind] = deltas.get(kind, "") + next(iter(delta.values()))
    assert (deltas["thinking_delta"], deltas["text_delta"]) == ("Hm.", "One moment.")
    assert json.loads(deltas["input_json_delta"]) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_counting_tokens(server):
    body = {"messages": [USER], "tools": [TOOL]}
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == post(server, tools=[TOOL]).json()["usage"]["input_tokens"]


def test_the_reasoning_can_be_switched_off(server):
    assert post(server, thinking={"type": "disabled"}).status_code == 200
    assert prompt_of(server.engine.seen[-1]).endswith("<think>\n\n</think>\n\n")


def test_errors_have_the_form_of_the_api(server):
    for fields, says in (
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads only text"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "no tools"),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "name is required"),
        ({"model": "gpt"}, "unknown model"),
        ({"tool_choice": {"type": "tool", "name": ""}, "tools": [TOOL]}, "at least 1 character"),
        ({"messages": [{"role": "assistant", "content": []}]}, "the message is empty"),
        ({"output_config": {"format": {"type": "json_schema", "schema": HUGE}}}, "more than 65536 characters"),
        ({"messages": [{"role": "user", "content": [{"type": "mcp"}]}]}, "blocks of the type 'mcp' are not supported"),
    ):
        refused = post(server, **fields)
        assert refused.status_code in (400, 404)
        assert refused.json()["type"] == "error"
        assert says in refused.json()["error"]["message"]


def test_the_key_may_be_sent_as_the_client_does():
    with serving(FakeEngine(), limits=ServerLimits(api_keys=("k3y",))) as server:
        body = {"max_tokens": 1, "messages": [USER]}
        refused = httpx.post(server.url + "/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert httpx.post(server.url + "/v1/messages", json=body, headers={"x-api-key": "k3y"}).status_code == 200


def test_threads_are_answered_so_that_the_client_sends_everything(server):
    assert post(server, thread={"type": "create"}).status_code == 200
    refused = post(server, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert refused.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_an_answer_in_json(server):
    schema = {"enum": ["yes", "no"]}
    answer = post(
        server, thinking={"type": "disabled"}, output_config={"format": {"type": "json_schema", "schema": schema}}
    ).json()
    assert json.loads(answer["content"][-1]["text"]) in ("yes", "no")


@pytest.mark.parametrize("arguments", ['{"days": 1e999}', '{"city": "\\ud83d"}'])
def test_arguments_that_json_cannot_express_are_left_out(tmp_path, arguments):
    output = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    with serving(
        FakeEngine(script=list(output.encode()), max_context=4096), template=hermes_template(tmp_path)
    ) as server:
        answer = post(server, tools=[TOOL])
        assert answer.status_code == 200
        assert answer.json()["content"][-1].get("input", {}) == {}


def test_what_only_other_servers_read_is_ignored(server):
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hm."}]
    messages = [USER, {"role": "assistant", "content": blocks}, USER]
    answer = post(server, messages=messages, context_management={"edits": []}, tools=[{**TOOL, "defer_loading": True}])
    assert answer.status_code == 200
    assert "Hm." in prompt_of(server.engine.seen[-1])


@pytest.mark.parametrize("prefill", ["<", "end", "i", "|", "Hm"])
def test_the_last_message_of_the_assistant_is_continued(server, prefill):
    assert post(server, messages=[USER, {"role": "assistant", "content": prefill}]).status_code == 200
    assert prompt_of(server.engine.seen[-1]).endswith(f"Weather?<|assistant|>{prefill}")
