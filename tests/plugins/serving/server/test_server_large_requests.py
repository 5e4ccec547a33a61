"""Requests of megabytes: early rejection, parsing off the event loop, and return of memory."""

import asyncio
import json
import random
import signal
import threading

import httpx
import pytest
from pydantic import ValidationError

from axlearn_plugins_serving.server import (
    anthropic_schemas,
    body_check,
    memory_return,
    message_schemas,
    schemas,
    text_pool,
)
from axlearn_plugins_serving.server.api_errors import ApiError, parse_body
from axlearn_plugins_serving.server.body_check import BodyCheck, count_values
from axlearn_plugins_serving.server.limits import ServerLimits
from axlearn_plugins_serving.server.memory_return import Budget, MemoryReturn
from axlearn_plugins_serving.server.text_pool import TextLimit
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson
from support.fake_engine import FakeEngine
from support.server_thread import serving

CONTEXT = 2048
USER = {"role": "user", "content": "a"}


class SpyTokenizer(ByteTokenizer):
    """A tokenizer that records encoded texts and their threads."""

    def __init__(self):
        super().__init__(ByteTokenizer.Config())
        self.calls = []

    def encode(self, text):
        self.calls.append((len(text), threading.current_thread().name))
        return super().encode(text)


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(max_context=CONTEXT), tokenizer=SpyTokenizer(), adapters=("polite",)) as running:
        yield running


@pytest.fixture
def calls(server):
    server.service.tokenizer.calls.clear()
    return server.service.tokenizer.calls


def post(server, path, **body):
    return httpx.post(server.url + path, json=body, timeout=30)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": ["short", "a" * 3000]}, "prompt"),
        ("/v1/completions", {"prompt": "é" * 2049}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 90}] * 40}, "messages"),
        ("/v1/responses", {"input": "a" * 300_000}, "input"),
    ],
)
def test_a_text_that_no_context_holds_is_not_tokenized(server, calls, path, body, param):
    answer = post(server, path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "the context has 2048 tokens" in error["message"]
    assert calls == []


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_texts_of_megabytes_are_not_counted(server, calls, kind):
    def body(size):
        text = "a" * size
        return {"prompt": text} if kind == "prompt" else {"messages": [{"role": "user", "content": text}]}

    assert post(server, "/tokenize", **body(text_pool.COUNTED - 100)).status_code == 200
    calls.clear()
    error = post(server, "/tokenize", **body(text_pool.COUNTED + 1)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", kind)
    assert calls == []


def test_the_longest_text_that_fits_is_taken(server, calls):
    assert post(server, "/v1/completions", prompt="a" * (CONTEXT - 1), max_tokens=1).status_code == 200
    refused = post(server, "/v1/completions", prompt="a" * CONTEXT, max_tokens=1)  # leaves no token for the output
    assert "the prompt has 2048, which leaves no room for an output" in refused.json()["error"]["message"]
    assert [size for size, _ in calls] == [CONTEXT - 1, CONTEXT]


def test_prompts_after_one_that_is_too_long_are_not_tokenized(server, calls):
    answer = post(server, "/v1/completions", prompt=["é" * 1500, *["a"] * 100])
    assert "the prompt has 3000" in answer.json()["error"]["message"]
    assert [size for size, _ in calls] == [1500]


@pytest.mark.parametrize(("size", "thread"), [(10, "server"), (5000, "text"), (300_000, "huge-text")])
def test_long_texts_are_encoded_off_the_event_loop(server, calls, size, thread):
    answer = post(server, "/tokenize", prompt="a" * size)  # also counts texts that do not fit
    assert answer.json()["count"] == size
    ((_, name),) = calls
    assert name.rpartition("_")[0] == thread or name == thread


def test_several_prompts_count_together(server, calls):
    assert post(server, "/v1/completions", prompt=["a" * 2000] * 4, max_tokens=1).status_code == 200
    assert {name.rpartition("_")[0] for _, name in calls} == {"text"}


@pytest.mark.parametrize(("size", "thread"), [(10, "server"), (5000, "text"), (300_000, "huge-text")])
def test_long_bodies_are_parsed_off_the_event_loop(server, monkeypatch, size, thread):
    names = []

    def parse(*args, **options):
        names.append(threading.current_thread().name)
        return parse_body(*args, **options)

    monkeypatch.setattr(body_check, "parse_body", parse)
    assert post(server, "/v1/completions", prompt="a", user="a" * size).status_code in (200, 400)
    (name,) = names
    assert name.rpartition("_")[0] == thread or name == thread


def test_a_conversation_is_rendered_off_the_event_loop(server, monkeypatch):
    names, render = [], server.service.text.template.render

    def spied(*args, **options):
        names.append(threading.current_thread().name)
        return render(*args, **options)

    monkeypatch.setattr(server.service.text.template, "render", spied)
    ignored = {"role": "user", "content": "a", "annotations": ["a" * 5000]}
    post(server, "/v1/chat/completions", messages=[USER], max_tokens=1)
    post(server, "/v1/chat/completions", messages=[ignored], max_tokens=1)
    assert [name.rpartition("_")[0] or name for name in names] == ["server", "text"]


def test_tokens_are_decoded_off_the_event_loop(server, monkeypatch):
    names, decode = [], ByteTokenizer.decode
    monkeypatch.setattr(
        SpyTokenizer, "decode", lambda self, ids: names.append(threading.current_thread().name) or decode(self, ids)
    )
    for size in (10, 5000):
        assert post(server, "/detokenize", tokens=[97] * size).json()["prompt"] == "a" * size
    assert [name.rpartition("_")[0] or name for name in names] == ["server", "text"]


MANY = 60_000
WRONG = {
    "prompt items": {"prompt": ["a"] * MANY},
    "prompt numbers": {"prompt": [1.5] * MANY},
    "prompt lists": {"prompt": [["a"]] * MANY},
    "unknown fields": {"prompt": "a", **{f"field{i}": 1 for i in range(MANY)}},
    "stop": {"prompt": "a", "stop": [1] * MANY},
    "stop tokens": {"prompt": "a", "stop_token_ids": ["x"] * MANY},
    "bias": {"prompt": "a", "logit_bias": {str(i): "x" for i in range(MANY)}},
    "schema": {
        "prompt": "a",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [1] * MANY}}},
    },
}
WRONG_CHATS = {
    "messages": {"messages": [{}] * MANY},
    "parts": {"messages": [{"role": "user", "content": [{}] * MANY}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
    "tools": {"messages": [USER], "tools": [{}] * MANY},
    "metadata": {"messages": [USER], "metadata": {str(i): 1 for i in range(MANY)}},
}
BODIES = [(schemas.CompletionRequest, name, body) for name, body in WRONG.items()]
BODIES += [(schemas.ChatRequest, name, body) for name, body in WRONG_CHATS.items()]
BODIES += [(schemas.DetokenizeRequest, "tokens", {"tokens": ["x"] * MANY})]
BODIES += [(schemas.ResponseRequest, "input", {"input": [{}] * MANY})]


@pytest.mark.slow_cases("bias", "unknown fields")
@pytest.mark.parametrize(("model", "body"), [(m, b) for m, _, b in BODIES], ids=[name for _, name, _ in BODIES])
def test_a_body_with_thousands_of_errors_is_not_read_to_its_end(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 16


def tools(count, numbers):
    return [{"name": f"f{i}", "parameters": {"enum": [1] * numbers}} for i in range(count)]


@pytest.mark.parametrize(("count", "numbers"), [(1, 200_000), (100, 3000)], ids=["one long", "many"])
def test_tools_that_take_long_to_write_are_refused(count, numbers):
    chat = {"messages": [USER], "tools": [{"type": "function", "function": f} for f in tools(count, numbers)]}
    response = {"input": "a", "tools": [{"type": "function", **f} for f in tools(count, numbers)]}
    for model, body in ((schemas.ChatRequest, chat), (schemas.ResponseRequest, response)):
        with pytest.raises(
            ApiError, match=f"tools: .* more than {message_schemas.MAX_TOOLS} characters; shorten"
        ) as caught:
            parse_body(model, json.dumps(body).encode())
        assert (caught.value.code, caught.value.param) == ("invalid_tools", "tools")


def called(arguments):
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize("encode", [json.dumps, lambda value: value], ids=["text", "object"])
def test_calls_with_long_arguments_are_refused(encode):
    arguments, block = {"a": [1] * 200_000}, {"type": "tool_use", "id": "c", "name": "f"}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": encode(arguments)}
    message = {"role": "assistant", "content": [{**block, "input": arguments}]}
    for model, body in (
        (schemas.ChatRequest, {"messages": called(encode(arguments))}),
        (schemas.ResponseRequest, {"input": [item]}),
        (anthropic_schemas.MessagesRequest, {"max_tokens": 1, "messages": [message]}),
    ):
        with pytest.raises(ApiError, match=f"the arguments have more than {message_schemas.MAX_ARGUMENTS} characters"):
            parse_body(model, json.dumps(body).encode())
    usual = parse_body(schemas.ChatRequest, json.dumps({"messages": called(encode({"a": "x" * 200_000}))}).encode())
    assert len(usual.messages[0].tool_calls) == 1


def test_many_tools_of_usual_size_are_taken():
    chat = {"messages": [USER], "tools": [{"type": "function", "function": f} for f in tools(128, 1000)]}
    assert len(parse_body(schemas.ChatRequest, json.dumps(chat).encode()).tools) == 128


def test_a_long_list_of_tokens_is_answered_whole(server):
    text = "".join(random.Random(0).choices("abcdef", k=50_000))
    answer = post(server, "/tokenize", prompt=text).json()
    assert answer == {"tokens": list(text.encode()), "count": 50_000, "max_model_len": CONTEXT}


def test_more_token_ids_than_the_context_has_are_not_checked():
    body = json.dumps({"prompt": [1] * 300 + ["x"]}).encode()
    with pytest.raises(ApiError, match="context has 256 tokens, but the prompt has 301") as caught:
        parse_body(schemas.CompletionRequest, body, context=256)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    texts = json.dumps({"prompt": ["x"] * 30}).encode()  # each text has its own context
    assert len(parse_body(schemas.CompletionRequest, texts, context=16).prompt) == 30


def test_an_error_shows_the_beginning_of_a_value_alone():
    body = json.dumps({"prompt": "a", "temperature": {"a": "x" * 100_000}}).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(schemas.CompletionRequest, body)
    assert caught.value.message.endswith('got {"a": "' + "x" * 70 + "...")


@pytest.fixture
def check():
    instance = BodyCheck(CONTEXT)
    yield instance
    instance.close()


def test_a_body_of_many_values_is_checked_elsewhere(check, monkeypatch):
    wrong = json.dumps(WRONG["bias"]).encode()
    right = json.dumps({"prompt": "a, " * MANY, "max_tokens": 3}).encode()
    with pytest.raises(ApiError) as direct:
        parse_body(schemas.CompletionRequest, wrong, context=CONTEXT)
    with monkeypatch.context() as patched:
        patched.setattr(body_check, "parse_body", None)
        with pytest.raises(ApiError) as elsewhere:
            check.parse(schemas.CompletionRequest, wrong)
    assert elsewhere.value.body == direct.value.body
    assert check.parse(schemas.CompletionRequest, right).max_tokens == 3
    first = check._process
    first.kill()
    first.wait()
    assert check.parse(schemas.CompletionRequest, right).prompt == "a, " * MANY
    assert check._process is not first


def test_a_process_that_does_not_answer_is_ended(check, monkeypatch):
    body = b'{"prompt": "a, b"}'  # it fits into the pipe
    monkeypatch.setattr(body_check, "MANY", 1)
    check.parse(schemas.CompletionRequest, body)
    check._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(body_check, "_SECONDS", 0.1)
    with pytest.raises(ApiError, match="too long or too much memory") as caught:
        check.parse(schemas.CompletionRequest, body)
    assert caught.value.code == "costly_body"
    assert check._process is None


def test_few_values_need_no_process(check):
    assert check.parse(schemas.CompletionRequest, b'{"prompt": "' + b"a" * 1_000_000 + b'"}').n is None
    assert check._process is None


def test_values_are_never_counted_too_low():
    draw = random.Random(0)

    def value(depth):
        if depth == 0 or draw.random() < 0.3:
            return draw.choice([1, "a,[", None, [], {}])
        children = [value(depth - 1) for _ in range(draw.randrange(4))]
        return children if draw.random() < 0.5 else {str(i): child for i, child in enumerate(children)}

    def size(tree):
        children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
        return 1 + sum(map(size, children))

    for _ in range(200):
        tree = value(5)
        assert 2 * count_values(json.dumps(tree).encode()) + 1 >= size(tree)


def test_the_limit_never_refuses_what_fits():
    tokenizer, draw = TokenizerJson.Config(builtin="python-2k").build(), random.Random(0)
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.decode([i])))
    limit = TextLimit(tokenizer, 64)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(63)] if draw.random() < 0.5 else [longest] * 63
        text = tokenizer.decode(ids)
        if len(tokenizer.encode(text)) < 64:
            limit.check(text, "prompt")
    with pytest.raises(ApiError, match="64 tokens"):
        limit.check("a" * (64 * tokenizer.longest_token() + 1), "prompt")


def test_a_tokenizer_that_does_not_tell_is_asked_for_tokens():
    class Unknown:
        vocab_size, eos_id = 3, 2

    TextLimit(Unknown(), 4).check("a" * 100_000, "prompt")


def test_memory_is_given_back_once_after_several_large_requests(monkeypatch):
    times = []
    monkeypatch.setattr(memory_return, "_SECONDS", 0.0)
    monkeypatch.setattr(memory_return, "return_memory", lambda: times.append(threading.current_thread().name))

    async def notes(*sizes):
        back = MemoryReturn()
        for size in sizes:
            back.note(size)
        await asyncio.sleep(0.01)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(notes(10, 1000))
    assert times == []
    asyncio.run(notes(memory_return.LARGE, 10, memory_return.LARGE * 2))
    assert len(times) == 1
    assert times[0] != threading.current_thread().name


def test_a_budget_is_given_in_order():
    async def main():
        budget, order = Budget(10), []

        async def task(name, size):
            await budget.take(size)
            order.append(name)

        await budget.take(6)
        tasks = [asyncio.create_task(task(name, size)) for name, size in (("large", 8), ("small", 1), ("huge", 99))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []  # the small one does not overtake the large one
        budget.release(6)
        await asyncio.wait(tasks[:2], timeout=5)
        assert order == ["large", "small"]
        budget.release(8)
        budget.release(1)
        await asyncio.wait_for(tasks[2], 5)  # a lone task can take more than the limit
        assert order[-1] == "huge"

    asyncio.run(main())


def test_large_bodies_take_turns():
    """All bodies are answered if only one fits at a time, even after one that never arrives."""
    size = memory_return.LARGE * 4
    limits = ServerLimits(large_bytes=size, body_seconds=0.3)
    with serving(FakeEngine(max_context=CONTEXT), limits=limits) as running:
        slow = httpx.Client(base_url=running.url, timeout=20)

        def half():
            yield b"a" * (size // 2)
            threading.Event().wait(0.8)

        stuck = threading.Thread(
            target=lambda: slow.post("/v1/completions", content=half(), headers={"content-type": "application/json"})
        )
        stuck.start()

        async def main():
            async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
                bodies = [{"prompt": "a" * size} for _ in range(4)]
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                small = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            return [answer.status_code for answer in answers], small.status_code

        assert asyncio.run(main()) == ([400] * 4, 200)
        stuck.join()
        assert running.service.thread.failure is None


def test_a_pool_that_is_closed_drops_what_waits():
    async def main():
        pool = text_pool.TextPool()
        begun, go = threading.Event(), threading.Event()
        first = asyncio.ensure_future(pool.run(lambda: begun.set() or go.wait(10), text_pool.HUGE + 1))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.ensure_future(pool.run(lambda: "late", text_pool.HUGE + 1))
        await asyncio.sleep(0)
        pool.close()
        go.set()
        assert await first
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(main())
