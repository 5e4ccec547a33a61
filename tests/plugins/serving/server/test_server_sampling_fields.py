"""Fields of vLLM and llama.cpp in requests: the engine's sampling, stop strings, special tokens, token ids and prompt scores."""

import json
import re

import httpx
import pytest

from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.structured_outputs import StructuredOutputs
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson
from support.fake_engine import FakeEngine
from support.server_thread import serving

TEXT = "Hello world, hello moon."


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(script=[*TEXT.encode(), 256], max_context=512, eos_id=256)) as server:
        yield server


def post(server, path="/v1/completions", **body):
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body.setdefault("prompt", "abc")
    response = httpx.post(server.url + path, json={"max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_sampling_reaches_the_engine(server):
    post(server, repetition_penalty=1.5, min_tokens=3, bad_words=["ab", " c"], top_p=0)
    sampling = server.engine.seen[-1].sampling
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.top_p) == (1.5, 3, 0.0)
    assert sampling.bad_tokens == ((97, 98), (32, 97, 98), (99,), (32, 99))


def test_the_defaults_of_the_model_apply(server, monkeypatch):
    monkeypatch.setattr(server.service.text, "sampling", {"temperature": 0.5, "repetition_penalty": 1.25})
    post(server)
    sampling = server.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0.5, 1.25)
    post(server, repetition_penalty=1.0)
    assert server.engine.seen[-1].sampling.repetition_penalty == 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_can_be_part_of_the_output_and_wait_for_the_minimum(server, stream):
    def text(**body):
        answer = post(server, stream=stream, **body)
        return "".join(chunk["choices"][0]["text"] for chunk in (answer if stream else [answer]))

    assert text(stop="llo") == "He"
    assert text(stop="llo", include_stop_str_in_output=True) == "Hello"
    assert text(stop=["llo", "w"], min_tokens=7) == "Hello world, he"
    assert text(stop="llo", min_tokens=4) == "He"  # "o" is the fifth token
    assert text(stop="moon.!") == TEXT


def test_token_ids(server):
    ids = list(TEXT.encode())
    (choice,) = post(server, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["token_ids"] == [*ids, 256]  # with the token that ended the output
    (stopped,) = post(server, return_token_ids=True, stop="llo")["choices"]
    assert stopped["token_ids"] == list(b"Hello")
    events = [event["choices"][0] for event in post(server, return_token_ids=True, stream=True)]
    assert [event.get("prompt_token_ids") for event in events] == [list(b"abc"), *[None] * (len(events) - 1)]
    assert [token for event in events for token in event["token_ids"]] == [*ids, 256]
    chat = post(server, "/v1/chat/completions", return_token_ids=True, n=2)
    assert bytes(chat["prompt_token_ids"]).startswith(b"User:")
    assert [choice["token_ids"] for choice in chat["choices"]] == [[*ids, 256]] * 2
    events = post(server, "/v1/chat/completions", return_token_ids=True, stream=True)
    assert [e.get("prompt_token_ids") for e in events] == [chat["prompt_token_ids"], *[None] * (len(events) - 1)]
    assert [t for e in events for t in e["choices"][0].get("token_ids", ())] == [*ids, 256]
    assert "token_ids" not in post(server)["choices"][0]


def test_prompt_logprobs(server):
    (choice,) = post(server, prompt="ab", prompt_logprobs=2)["choices"]
    assert choice["logprobs"] is None
    first = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    second = {"logprob": -1.25, "rank": 2, "decoded_token": "c"}
    assert choice["prompt_logprobs"] == [None, {"98": first, "99": second}]
    (choice,) = post(server, prompt="ab", prompt_logprobs=0, logprobs=1, echo=True)["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {**first, "rank": None}}]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.25}
    chat = post(server, "/v1/chat/completions", prompt_logprobs=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert next(iter(chat["prompt_logprobs"][1].values()))["decoded_token"] == "s"


def test_echo_with_logprobs_in_a_stream_equals_the_whole_response(server):
    body = {"prompt": ["aé", "b"], "max_tokens": 5, "logprobs": 1, "echo": True, "n": 2}
    whole = post(server, **body)
    for max_tokens in (5, 0):
        body["max_tokens"] = max_tokens
        whole, choices = post(server, **body), {}
        for event in post(server, stream=True, **body):
            (choice,) = event["choices"]
            merged = choices.setdefault(choice["index"], {"text": "", "scores": {}})
            merged["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                merged["scores"].setdefault(name, []).extend(values)
        for choice in whole["choices"]:
            assert choices[choice["index"]] == {"text": choice["text"], "scores": choice["logprobs"]}
            check_offsets(choice)


def check_offsets(choice):
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize("tokenizer", ["bytes", "library"])
def test_special_tokens_are_spelled_on_request(tokenizer):
    config = ByteTokenizer.Config() if tokenizer == "bytes" else TokenizerJson.Config(builtin="python-2k")
    tokenizer = config.build()
    end, word = tokenizer.eos_id, tokenizer.encode("a")
    script = [*word, end, *word]
    with serving(FakeEngine(script=script, vocab_size=tokenizer.vocab_size), tokenizer=tokenizer) as server:
        spelling = server.service.text.spell([end])
        (plain,) = post(server, prompt=[*word, end], ignore_eos=True, echo=True, logprobs=0)["choices"]
        assert plain["text"] == "aaa"
        (spelled,) = post(server, prompt=[*word, end], echo=True, logprobs=0, skip_special_tokens=False)["choices"]
        assert spelled["text"] == f"a{spelling}a{spelling}a"
        assert plain["logprobs"]["text_offset"] == [0, 1, 1, 2, 2]
        step = 1 + len(spelling)
        assert spelled["logprobs"]["text_offset"] == [0, 1, step, step + 1, 2 * step]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}x"}}, "[a-c]{3}x"),
        ({"structured_outputs": {"choice": ['say "é"', "no"]}}, 'say "é"|no'),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" "c"'}}, "a|bc"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" "c"'}}, "a|bc"),
        ({"grammar": 'root ::= [0-9] "!"'}, "[0-9]!"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "[12]"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "[12]"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
    ],
)
def test_outputs_match_their_structure(hashing, fields, pattern):
    for prompt in ("abc", "x"):
        (choice,) = post(hashing, prompt=prompt, max_tokens=40, **fields)["choices"]
        assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice["text"]
    chat = post(hashing, "/v1/chat/completions", max_tokens=40, **fields)
    assert re.fullmatch(pattern, chat["choices"][0]["message"]["content"], re.DOTALL)


@pytest.fixture(scope="module")
def hashing():
    with serving(FakeEngine(max_context=512, eos_id=256)) as server:
        yield server


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("preferred_text", [" ", "\n", "\t", "\r\n", " \n"])
def test_white_space_in_json_is_limited(preferred_text):
    grammars = Grammars(ByteTokenizer.Config().build(), 257)
    constraint, text = grammars.build(StructuredOutputs(json=SCHEMA).source), []
    for _ in range(2000):
        mask = constraint.mask()
        allowed = [token for token in range(257) if mask[token // 32] >> (token % 32) & 1]
        preferred = [token for token in preferred_text.encode() if token in allowed]
        text.append(preferred[0] if preferred else allowed[0])
        if constraint.accept(text[-1]):
            break
    assert json.loads(bytes(t for t in text if t < 256)).keys() == {"a", "b"}


def test_indented_json_is_allowed():
    grammars = Grammars(ByteTokenizer.Config().build(), 257)
    for indent in (None, 2, 4, "\t"):
        constraint = grammars.new(SCHEMA)
        for token in json.dumps({"a": 1, "b": [True, False]}, indent=indent).encode():
            mask = constraint.mask()
            assert mask[token // 32] >> (token % 32) & 1
            constraint.accept(token)
