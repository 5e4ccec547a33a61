"""Items, streams, stored and background responses of `/v1/responses`, read by the official client."""

import json
import sqlite3
import time

import httpx
import pytest

from axlearn_plugins_serving.server import responses
from axlearn_plugins_serving.server.response_store import ResponseStore
from axlearn_plugins_serving.server.text_pool import SHORT
from support.fake_engine import FakeEngine
from support.scripted_models import WEATHER, hermes_template, prompt_of
from support.server_thread import serving

TOOL = {"type": "function", **WEATHER["function"]}
OUTPUT = '<think>\nHm.\n</think>\n\nOne moment.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def script(request):
    prompt = prompt_of(request)
    if "slow!" in prompt:
        return list(b"x" * 3000)
    return list(("Sunny." if "<|tool|>" in prompt or "Tools:" not in prompt else OUTPUT).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = hermes_template(tmp_path_factory.mktemp("template"))
    with serving(FakeEngine(script=script, max_context=4096, delay=0.001), template=template) as server:
        yield server


@pytest.fixture
def client(server):
    import openai  # takes half a second, so not while tests are collected

    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def ask(client, input="Weather?", **options):
    return client.responses.create(model="tiny", input=input, tools=[TOOL], **options)


def test_the_output_has_an_item_for_each_part(client, server):
    response = ask(client)
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
        "One moment.",
        "get_weather",
        {"city": "Rome"},
    )
    assert [item.id.split("_")[0] for item in response.output] == ["rs", "msg", "fc"]
    assert response.id.startswith("resp_")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    history = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in response.output), output]
    assert ask(client, history).output_text == "Sunny."
    prompt = prompt_of(server.engine.seen[-1])
    assert "<|assistant|><think>Hm.</think>One moment.<tool_call>" in prompt
    assert prompt.count("<|assistant|>") == 2  # the answer, and the beginning of the next one


def test_the_events_of_a_stream(client):
    with client.responses.stream(model="tiny", input="Weather?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = ask(client).model_dump()["output"]
    without = {"id", "call_id", "parsed_arguments"}
    for streamed, item in zip(final.model_dump()["output"], whole, strict=True):
        assert {k: v for k, v in streamed.items() if k not in without and k != "content"} == {
            k: v for k, v in item.items() if k not in without and k != "content"
        }


def test_logprobs_of_the_text(client):
    response = client.responses.create(
        model="tiny", input="Hi", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    logprobs = response.output[-1].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "Sunny."
    assert len(logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_leave_out_the_reasoning_calls_and_markers(client, stream):
    options = {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    if not stream:
        message = ask(client, **options).output[1]
    else:
        deltas = []
        with client.responses.create(model="tiny", input="Weather?", tools=[TOOL], stream=True, **options) as events:
            for event in events:
                if event.type == "response.output_text.delta":
                    deltas += event.logprobs
                elif event.type == "response.completed":
                    message = event.response.output[1]
        assert [entry.token for entry in deltas] == list("One moment.")
        assert deltas[0].top_logprobs
    part = message.content[0]
    assert [entry.token for entry in part.logprobs] == list("One moment.") == list(part.text)


def test_logprobs_of_text_that_the_parser_held_back(tmp_path):
    text = "A <tool_calx> é."
    template = hermes_template(tmp_path)
    with serving(FakeEngine(script=list(f"\n\n{text}".encode()), max_context=4096), template=template) as server:
        body = {"input": "a", "tools": [TOOL], "top_logprobs": 0}
        (message,) = httpx.post(f"{server.url}/v1/responses", json=body).json()["output"]
    (part,) = message["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
    assert part["text"].endswith(text)


def test_a_long_stored_conversation_is_rendered_in_a_thread(client, server, monkeypatch):
    first = client.responses.create(model="tiny", input="a" * 3000, store=True)
    sizes, render = [], type(server.service).render
    monkeypatch.setattr(
        type(server.service), "render", lambda self, c, size, **o: (sizes.append(size), render(self, c, size, **o))[1]
    )
    client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    client.responses.input_tokens.count(model="tiny", input="b", previous_response_id=first.id)
    assert min(sizes) > SHORT


def test_items_of_stored_responses_are_referred_to(client, server):
    """As the AI SDK does it, which does not use `previous_response_id`."""
    first = ask(client, store=True)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    question = {"role": "user", "content": "Weather?"}
    second = ask(client, [question, *references, output], store=True)
    assert second.output_text == "Sunny."
    items = httpx.get(f"{server.url}/v1/responses/{second.id}/input_items").json()["data"]
    assert [item.get("id") for item in items[1:-1]] == [item.id for item in first.output]
    assert [item["type"] for item in items[1:-1]] == [item.type for item in first.output]
    by_reference = prompt_of(server.engine.seen[-1])
    ask(client, [question, *(item.model_dump() for item in first.output), output])
    assert by_reference == prompt_of(server.engine.seen[-1])
    assert "<|user|>Weather?<|assistant|><think>Hm.</think>One moment.<tool_call>" in by_reference
    client.responses.delete(first.id)
    items = httpx.get(f"{server.url}/v1/responses/{second.id}/input_items").json()["data"]
    assert items[1:-1] == references, "nobody knows the items any more"


@pytest.mark.parametrize("path", ["responses", "responses/input_tokens"])
def test_a_reference_to_an_item_that_is_not_stored_is_an_error(client, server, path):
    first = ask(client, store=False)
    items = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": first.output[0].id}]
    answer = httpx.post(f"{server.url}/v1/{path}", json={"input": items})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[1].id", "item_not_found")
    assert "`store: false`" in error["message"]


def test_references_to_items_have_limits(client, server, monkeypatch):
    first = ask(client, store=True)
    reference = {"type": "item_reference", "id": first.output[0].id}
    monkeypatch.setattr(responses, "MAX_RECORD_BYTES", 1000)
    error = httpx.post(f"{server.url}/v1/responses", json={"input": [reference] * 100}).json()["error"]
    assert (error["code"], error["param"].startswith("input[")) == ("input_too_large", True)


def test_a_reference_to_a_call_that_was_cut_off_is_an_error(client, server):
    first = ask(client, store=True)
    stored = server.service.responses.get(first.id)
    stored.response["output"][-1]["arguments"] = '{"city": '
    server.service.responses.put(stored)
    answer = httpx.post(
        f"{server.url}/v1/responses", json={"input": [{"type": "item_reference", "id": first.output[-1].id}]}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[0].id", "item_incomplete")


def test_a_stored_response_is_continued(client, server):
    first = ask(client, instructions="Be brief.", store=True)
    call = first.output[-1]
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    second = ask(client, output, previous_response_id=first.id, store=True)
    assert (second.output_text, second.previous_response_id) == ("Sunny.", first.id)
    prompt = prompt_of(server.engine.seen[-1])
    assert "Be brief." not in prompt  # instructions apply to one response
    assert "<|user|>Weather?<|assistant|><think>Hm.</think>One moment.<tool_call>" in prompt
    third = client.responses.create(model="tiny", input="And now?", previous_response_id=second.id, store=False)
    assert "Sunny.<|user|>And now?" in prompt_of(server.engine.seen[-1])
    assert client.responses.retrieve(first.id).output[0].content[0].text == "Hm."
    assert client.responses.input_items.list(second.id).data[0].output == "sun"
    client.responses.delete(first.id)
    for id in (first.id, third.id):  # the third was not stored
        missing = httpx.get(f"{server.url}/v1/responses/{id}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")


def test_a_background_response_is_polled_and_cancelled(client, server):
    response = client.responses.create(model="tiny", input="Hi", background=True, store=True)
    assert response.status == "queued"
    for _ in range(500):
        response = client.responses.retrieve(response.id)
        if response.status not in ("queued", "in_progress"):
            break
        time.sleep(0.02)
    assert (response.status, response.output_text) == ("completed", "Sunny.")
    slow = client.responses.create(model="tiny", input="slow!", background=True, store=True)
    for _ in range(500):
        if client.responses.retrieve(slow.id).status == "in_progress":
            break
        time.sleep(0.02)
    assert client.responses.retrieve(slow.id).output == []
    cancelled = client.responses.cancel(slow.id)
    assert cancelled.status == "cancelled"
    server.wait_until_idle()
    refused = httpx.post(f"{server.url}/v1/responses/{ask(client, store=True).id}/cancel")
    assert refused.status_code == 400


def test_a_response_that_cannot_be_written_is_returned(client, server, monkeypatch, caplog):
    def fail(*_):
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(server.service.responses, "put", fail)
    response = ask(client, "<|tool|>", store=True)
    assert (response.output_text, response.store) == ("Sunny.", False)
    assert "disk full" in caplog.text
    with client.responses.stream(model="tiny", input="<|tool|>", store=True) as stream:
        assert stream.get_final_response().output_text == "Sunny."
    refused = httpx.post(f"{server.url}/v1/responses", json={"input": "a", "background": True, "store": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (500, "store")
    server.wait_until_idle()


def test_a_response_that_is_too_large_is_not_stored(client, server, monkeypatch, caplog):
    monkeypatch.setattr(server.service, "responses", ResponseStore(max_record_bytes=1000))
    response = ask(client, "<|tool|>", store=True)
    assert (response.output_text, response.store) == ("Sunny.", False)
    assert "the server stores at most 1,000" in caplog.text
    body = {"input": "a" * 1000, "background": True, "store": True}
    refused = httpx.post(f"{server.url}/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")
    server.wait_until_idle()


def test_a_background_response_with_an_unexpected_error_fails(client, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("axlearn_plugins_serving.server.response_answer.ResponseAnswer._read", fail)
    response = client.responses.create(model="tiny", input="Hi", background=True, store=True)
    for _ in range(500):
        response = client.responses.retrieve(response.id)
        if response.status == "failed":
            break
        time.sleep(0.02)
    assert response.error.message == "internal server error; see the server's log"
    assert "RuntimeError: a bug" in caplog.text
    events = list(client.responses.create(model="tiny", input="Hi", store=True, stream=True))
    assert events[-1].type == "response.failed"
    assert client.responses.retrieve(events[-1].response.id).status == "failed"


def test_counting_the_tokens_of_the_input(client, server):
    count = client.responses.input_tokens.count(model="tiny", input="Weather?", tools=[TOOL]).input_tokens
    assert count == ask(client).usage.input_tokens


def test_a_benchmark_continues_after_the_end_token(client, server):
    ask(client, max_output_tokens=3, extra_body={"ignore_eos": True, "stop": None})
    assert server.engine.seen[-1].sampling.ignore_end
    ask(client, max_output_tokens=3)
    assert not server.engine.seen[-1].sampling.ignore_end


def test_tool_choices(client, server):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    assert ask(client, tool_choice=allowed).output[-1].type == "function_call"
    assert ask(client, tool_choice="none").output_text == "Sunny."
    named = ask(client, tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=50)
    assert named.output[-1].name == "get_weather"


def test_an_adapter_is_unloaded_before_its_response_is_complete(tmp_path):
    """The server looks up the adapter when the request arrives, and not again when the response is complete."""

    def unload(request):
        server.service.adapters = ()
        return list(b"Hi")

    template = hermes_template(tmp_path)
    with serving(FakeEngine(script=unload), template=template, adapters=("polite",)) as server:
        for path, body in (
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
        ):
            server.service.adapters = ("polite",)
            answer = httpx.post(server.url + path, json={**body, "model": "polite"})
            assert (answer.status_code, answer.json()["model"]) == (200, "polite")
