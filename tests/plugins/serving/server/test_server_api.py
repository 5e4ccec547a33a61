"""The API, called by the official client."""

import concurrent.futures
import json
from importlib.metadata import version

import httpx
import pytest

from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson
from support.fake_engine import FakeEngine, next_token
from support.server_thread import serving

TEXT = "Hello wörld, this is 😀 it."
SCRIPT = list(TEXT.encode())


@pytest.fixture(scope="module")
def scripted():
    """Run a server whose outputs are always TEXT."""
    with serving(FakeEngine(script=SCRIPT, max_context=512), adapters=("polite",)) as server:
        yield server
        server.wait_until_idle()
        assert server.engine.free == server.engine.blocks


@pytest.fixture
def client(scripted):
    import openai  # takes half a second, so not while tests are collected

    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def hashed(prompt, count):
    """Return the text that the hashing engine generates."""
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(next_token(tokens, 257))
    return ByteTokenizer.Config().build().decode(tokens[len(prompt.encode()) :])


def test_models(client):
    import openai

    models = list(client.models.list())
    assert [m.id for m in models] == ["tiny", "polite"]
    assert models[0].model_extra["max_model_len"] == 512
    assert client.models.retrieve("polite").model_extra["parent"] == "tiny"
    with pytest.raises(openai.NotFoundError, match="did you mean tiny"):
        client.models.retrieve("tinny")


def test_a_completion(client):
    response = client.completions.create(model="tiny", prompt="abc", max_tokens=100)
    assert response.choices[0].text == TEXT
    assert response.choices[0].finish_reason == "stop"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, len(SCRIPT))
    short = client.completions.create(model="tiny", prompt="abc", max_tokens=5)
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("Hello", "length")
    assert client.completions.create(model="tiny", prompt="abc").usage.completion_tokens == 16


def test_a_stream_is_the_same_text(client):
    chunks = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == TEXT
    assert all("\ufffd" not in c.choices[0].text for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(SCRIPT)
    assert all(c.usage is None for c in chunks[:-1])
    plain = list(client.completions.create(model="tiny", prompt="abc", stream=True))
    assert all(c.usage is None for c in plain)


def test_usage_in_every_event(scripted):
    body = {
        "prompt": "abc",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    text = httpx.post(scripted.url + "/v1/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert text.endswith("data: [DONE]\n\n")


def test_prompts_of_all_forms(client):
    tokens = list(b"abc")
    for prompt, count in (("abc", 1), (["abc", "de"], 2), (tokens, 1), ([tokens, [1, 2]], 2)):
        response = client.completions.create(model="tiny", prompt=prompt, max_tokens=100, n=2)
        assert [c.index for c in response.choices] == list(range(2 * count))
        assert {c.text for c in response.choices} == {TEXT}
        assert response.usage.completion_tokens == 2 * count * len(SCRIPT)
    assert response.usage.prompt_tokens == 5


def test_an_empty_prompt_is_the_end_token(client, scripted):
    assert client.completions.create(model="tiny", prompt="", max_tokens=1).usage.prompt_tokens == 1
    assert scripted.engine.seen[-1].prompt == (256,)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("is is 😀", "Hello wörld, th"),
        ("😀", "Hello wörld, this is "),
        (["xx", "ö"], "Hello w"),
        (["no"], TEXT),
        (None, TEXT),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stop, text, stream):
    response = client.completions.create(model="tiny", prompt="abc", max_tokens=100, stop=stop, stream=stream)
    choices = [c.choices[0] for c in response] if stream else [response.choices[0]]
    assert "".join(c.text for c in choices) == text
    assert choices[-1].finish_reason == "stop"


def test_a_stop_string_ends_the_computation():
    with serving(FakeEngine(script=[65] * 100_000, max_context=100_000)) as server:
        body = {"prompt": "abc", "max_tokens": 90_000, "stop": "AAAA"}
        response = httpx.post(server.url + "/v1/completions", json=body).json()
        assert response["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        server.wait_until_idle()
        assert server.engine.output_tokens < 1000
        assert len(server.engine.aborted) == 1


def test_sampling_reaches_the_engine(client, scripted):
    client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        n=2,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"65": 10, "66": -100},
        user="ada",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [7], "priority": -2},
    )
    first, second = scripted.engine.seen[-2:]
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert sampling.logit_bias == {65: 10.0, 66: -100.0}
    assert (sampling.max_tokens, sampling.ignore_end, sampling.stop_tokens) == (7, True, frozenset({7}))
    assert (sampling.seed, second.sampling.seed) == (11, 12)
    assert (first.client, first.priority) == ("ada", -2)
    client.completions.create(model="polite", prompt="abc")
    plain = scripted.engine.seen[-1]
    assert plain.adapter == "polite"
    assert (plain.sampling.temperature, plain.sampling.top_k, plain.sampling.seed) == (1.0, None, None)


def test_log_probabilities_of_a_completion(client):
    response = client.completions.create(model="tiny", prompt="ab", max_tokens=10, logprobs=2)
    scores = response.choices[0].logprobs
    assert scores.tokens[:3] == ["H", "e", "l"]
    assert scores.token_logprobs == [-0.25] * 10
    assert scores.top_logprobs[0] == {"I": -1.25, "H": -0.25}
    assert scores.text_offset[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert scores.tokens[7:9] == ["bytes:\\xc3", "bytes:\\xb6"]
    stream = client.completions.create(model="tiny", prompt="ab", max_tokens=10, logprobs=2, stream=True)
    chunks = [c.choices[0].logprobs for c in stream]
    assert [t for c in chunks if c for t in c.tokens] == scores.tokens
    assert [o for c in chunks if c for o in c.text_offset] == scores.text_offset


def test_tokens_behind_a_stop_string_have_no_log_probabilities(client):
    response = client.completions.create(model="tiny", prompt="ab", max_tokens=100, logprobs=0, stop="llo")
    assert response.choices[0].text == "He"
    assert response.choices[0].logprobs.tokens == ["H", "e"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt(client, max_tokens):
    response = client.completions.create(model="tiny", prompt="aé", max_tokens=max_tokens, logprobs=1, echo=True)
    choice = response.choices[0]
    assert choice.text == "aé" + "H" * max_tokens
    assert choice.logprobs.token_logprobs == [None, *[-0.25] * (2 + max_tokens)]
    assert choice.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "H"][: 3 + max_tokens]
    assert response.usage.completion_tokens == max_tokens
    stream = client.completions.create(model="tiny", prompt="ab", max_tokens=2, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in stream) == "abHe"


def test_a_chat(client, scripted):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    response = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=100, n=2)
    assert [c.message.content for c in response.choices] == [TEXT, TEXT]
    assert response.choices[0].message.role == "assistant"
    assert bytes(scripted.engine.seen[-1].prompt) == b"System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\n"
    assert (
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices[0].message.content == "He"
    )
    whole = client.chat.completions.create(model="tiny", messages=messages)
    assert whole.choices[0].finish_reason == "stop"  # limited only by the context


def test_a_chat_as_a_stream(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
    )
    for index in (0, 1):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in own) == TEXT
        assert [c.delta.role for c in own] == ["assistant", *[None] * (len(own) - 1)]
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 2 * len(SCRIPT)
    assert len({c.id for c in chunks}) == 1


def test_log_probabilities_of_a_chat(client):
    options = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    content = client.chat.completions.create(model="tiny", **options).choices[0].logprobs.content
    assert [c.token for c in content][:2] == ["H", "e"]
    assert content[7].bytes == [0xC3]
    assert [t.token for t in content[0].top_logprobs] == ["H", "I"]
    assert [t.logprob for t in content[0].top_logprobs] == [-0.25, -1.25]
    chunks = [c.choices[0].logprobs for c in client.chat.completions.create(model="tiny", stream=True, **options)]
    assert [t.token for c in chunks if c for t in c.content] == [t.token for t in content]


def test_tools_go_through_the_template(tmp_path):
    import openai

    (tmp_path / "t.jinja").write_text(
        "{% for t in tools or [] %}T:{{ t.function.name }} {{ t.function.parameters | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}"
        "{{ m.tool_call_id or '' }};{% endfor %}"
    )
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja")).build(tokenizer=ByteTokenizer.Config().build())
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]
    with (
        serving(FakeEngine(script=list(b"<call>")), template=template, tool_parser="none") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        response = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        assert response.choices[0].message.content == "<call>"
        assert bytes(server.engine.seen[-1].prompt).decode() == (
            f"T:f {json.dumps(parameters)}\nuser=go;assistant=f(3);tool=9c1;"
        )
        client.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="none")
        assert not bytes(server.engine.seen[-1].prompt).startswith(b"T:")


def test_templates_see_the_fields_in_the_order_of_the_request(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja")).build(tokenizer=ByteTokenizer.Config().build())
    function = {"parameters": {"type": "object", "default": None}, "name": "f", "strict": None}
    shown = {"parameters": function["parameters"], "name": "f"}
    call = {"function": {"arguments": {"x": 3}, "name": "f"}, "id": "c1", "type": "function"}
    messages = [{"content": "", "role": "assistant", "tool_calls": [call]}]
    with serving(FakeEngine(max_context=2000), template=template, tool_parser="none") as server:
        body = {"messages": messages, "max_tokens": 1, "tools": [{"function": function, "type": "function"}]}
        assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200
        tools = [{"function": shown, "type": "function"}]
        assert bytes(server.engine.seen[-1].prompt).decode() == json.dumps(tools) + json.dumps(messages[0])
        body = {"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", **function}]}
        assert httpx.post(server.url + "/v1/responses", json=body).status_code == 200
        tools = [{"type": "function", "function": shown}]
        assert bytes(server.engine.seen[-1].prompt).decode().startswith(json.dumps(tools))


def test_a_model_without_a_template_says_what_to_set():
    with serving(FakeEngine(), template=None) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        refused = httpx.post(server.url + "/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "--chat-template plain" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "no_chat_template"
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 200


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tokenizer", ["bytes", "python"])
def test_json_that_meets_a_schema(tokenizer):
    import openai

    config = ByteTokenizer.Config() if tokenizer == "bytes" else TokenizerJson.Config(builtin="python-2k")
    tokenizer = config.build()
    engine = FakeEngine(vocab_size=tokenizer.vocab_size + 40, max_context=2000)
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    with (
        serving(engine, tokenizer=tokenizer) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        messages = [{"role": "user", "content": "Who?"}]
        answers = client.chat.completions.create(model="tiny", messages=messages, response_format=format, n=4)
        for choice in answers.choices:
            person = json.loads(choice.message.content)
            assert choice.finish_reason == "stop"
            assert set(person) == {"name", "age"}
            assert len(person["name"]) <= 5
            assert 0 <= person["age"] <= 99
        flat = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
        response = client.responses.create(model="tiny", input="Who?", text=flat)
        assert set(json.loads(response.output_text)) == {"name", "age"}
        some = client.chat.completions.create(
            model="tiny", messages=messages, response_format={"type": "json_object"}, max_tokens=50
        )
        assert some.choices[0].message.content.startswith("{")
        server.wait_until_idle()
        assert engine.free == engine.blocks


def test_responses(client, scripted):
    response = client.responses.create(model="tiny", input="Hi", instructions="Be brief.", max_output_tokens=100)
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.usage.output_tokens == len(SCRIPT)
    assert bytes(scripted.engine.seen[-1].prompt).startswith(b"System:\nBe brief.\n\nUser:\nHi")
    again = [
        {"role": "user", "content": "Hi"},
        *(o.model_dump() for o in response.output),
        {"role": "user", "content": "On"},
    ]
    short = client.responses.create(model="tiny", input=again, max_output_tokens=4)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert TEXT.encode() in bytes(t for t in scripted.engine.seen[-1].prompt if t < 256)


def test_responses_as_a_stream(client):
    with client.responses.stream(model="tiny", input="Hi") as stream:
        kinds = [e.type for e in stream]
        assert stream.get_final_response().output_text == TEXT
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_tokens_there_and_back(scripted):
    response = httpx.post(scripted.url + "/tokenize", json={"prompt": "aé"}).json()
    assert response == {"tokens": [97, 0xC3, 0xA9], "count": 3, "max_model_len": 512}
    assert httpx.post(scripted.url + "/detokenize", json={"tokens": response["tokens"]}).json() == {"prompt": "aé"}
    assert httpx.post(scripted.url + "/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    chat = httpx.post(scripted.url + "/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert bytes(chat["tokens"]) == b"User:\nHi\n\nAssistant:\n"
    body = {"prompt": 'a"\u00e9', "return_token_strs": True}
    assert httpx.post(scripted.url + "/tokenize", json=body).json()["token_strs"] == [
        "a",
        '"',
        "bytes:\\xc3",
        "bytes:\\xa9",
    ]
    refused = httpx.post(scripted.url + "/tokenize", json={"prompt": "a", "return_token_strs": "yes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")


def test_metrics_and_health(client, scripted):
    client.completions.create(model="tiny", prompt="abc", max_tokens=3)
    text = httpx.get(scripted.url + "/metrics").text
    assert 'axlearn_responses_total{model_name="tiny",path="/v1/completions",status="200"}' in text
    assert 'axlearn_compilations_total{model_name="tiny"} 0.0' in text
    assert 'axlearn_first_token_seconds_count{model_name="tiny"}' in text
    stats = httpx.get(scripted.url + "/stats").json()
    assert stats["model"] == "tiny"
    assert httpx.get(scripted.url + "/health").json() == {"status": "ok"}
    for method in ("GET", "POST"):
        assert httpx.request(method, scripted.url + "/ping").json() == {"status": "ok"}
    assert httpx.get(scripted.url + "/version").json() == {"version": version("axlearn-plugins-serving")}


def test_the_load_is_the_number_of_unfinished_requests():
    with serving(FakeEngine(script=[65] * 100_000, max_context=100_000, delay=0.002)) as server:
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}
        body = {"prompt": "abc", "max_tokens": 90_000, "stream": True, "n": 2}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # closing it closes the stream
            next(lines)
            assert httpx.get(server.url + "/load").json() == {"server_load": 2}
        server.wait_until_idle()
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}


def test_a_model_with_several_names():
    import openai

    with (
        serving(FakeEngine(script=SCRIPT), name="first", aliases=("second",), adapters=("polite",)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        assert [(m.id, m.model_extra["parent"]) for m in client.models.list()] == [
            ("first", None),
            ("second", None),
            ("polite", "first"),
        ]
        for name, answered in (("first", "first"), ("second", "first"), ("polite", "polite")):
            messages = [{"role": "user", "content": "Hi"}]
            assert client.completions.create(model=name, prompt="a").model == answered
            assert client.chat.completions.create(model=name, messages=messages).model == answered
            assert client.responses.create(model=name, input="Hi").model == answered
        with pytest.raises(openai.NotFoundError, match="did you mean second"):
            client.models.retrieve("secnd")


def test_outputs_do_not_depend_on_other_requests():
    import openai

    with (
        serving(FakeEngine(max_context=512)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        prompts = [f"prompt {i}" for i in range(60)]
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            texts = list(
                pool.map(
                    lambda p: client.completions.create(model="tiny", prompt=p, max_tokens=40).choices[0].text, prompts
                )
            )
        assert texts == [hashed(p, 40) for p in prompts]
        server.wait_until_idle()
        assert server.engine.free == server.engine.blocks


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ messages[7].content }}", "has no element 7"),
    ],
    ids=["raises", "wrong type", "missing message"],
)
def test_a_template_that_fails_is_an_error_of_the_request(template, reason, tmp_path):
    (tmp_path / "t.jinja").write_text(template)
    built = ChatTemplate.Config(path=str(tmp_path / "t.jinja")).build(tokenizer=ByteTokenizer.Config().build())
    with serving(FakeEngine(), template=built) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        for path, param in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            sent = body if param == "messages" else {"input": body["messages"]}
            refused = httpx.post(server.url + path, json=sent)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, param, "chat_template")
            begin = f"{param}: the model's chat template cannot render it: "
            assert error["message"].startswith(begin)  # without the path of a file on the server
            assert reason in error["message"], error["message"]
            assert error["message"].startswith(f"{param}: ")
