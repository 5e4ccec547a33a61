"""Invalid requests and the errors that they must get."""

import json

import attrs

TEXT, CHAT, RESPONSE, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED_G = {"type": "function", "function": {"name": "g"}}
USER_EMPTY = {"role": "user", "content": ""}
IMAGE_BLOCK = b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}'


@attrs.frozen
class Bad:
    """An invalid request.

    Attributes:
        status: HTTP status of the response.
        says: Part of the error message.
        param: Field that the error names; None if it does not matter.
    """

    name: str
    path: str
    content: bytes
    status: int = 400
    says: str = ""
    param: str | None = None
    kind: str = "application/json"


def text(name, says="", param=None, status=400, **fields):
    return Bad(name, TEXT, json.dumps({"prompt": "a"} | fields).encode(), status, says, param)


def chat(name, says="", param=None, status=400, **fields):
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    return Bad(name, CHAT, json.dumps(body).encode(), status, says, param)


def called(arguments):
    """Return messages with a tool call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


def raw(name, content, says="", path=TEXT, **options):
    return Bad(name, path, content, says=says, **options)


def schema(name, value, says, param="response_format.json_schema.schema"):
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}
    return chat(name, says, param, response_format=format)


BAD = (
    raw("empty", b"", "not JSON"),
    raw("no-json", b"hello", "not JSON"),
    raw("half", b'{"prompt": "a"', "not JSON"),
    raw("list", b"[]", "object"),
    raw("null", b"null", "object"),
    raw("nan", b'{"prompt": "a", "temperature": NaN}', "finite"),
    raw("infinity", b'{"prompt": "a", "temperature": Infinity}', "finite"),
    raw("huge-exponent", b'{"prompt": "a", "temperature": 1e999}', ""),
    raw("broken-utf8", b'{"prompt": "a\xff"}', "not JSON"),
    raw("lone-surrogate", b'{"prompt": "a\\ud800"}', "not JSON"),
    raw("deep", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    raw("deep-schema", b'{"prompt": "a", "metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}", ""),
    raw("other-type", b"prompt=a", "application/json", kind="application/x-www-form-urlencoded", status=415),
    raw("unknown-charset", b'{"prompt": 1}', "prompt", kind="application/json; charset=utf-16"),
    raw("no-prompt", b"{}", "is required", param="prompt"),
    raw("body-too-large", b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}', "larger than", status=413),
    text("misspelled", "did you mean temperature?", "temprature", temprature=1),
    text("unknown-field", "unknown field", "nonsense", nonsense=1),
    text("field-of-chats", "unknown field", "messages", messages=["a"]),
    text("prompt-number", "valid string", "prompt", prompt=7),
    text("prompt-null", "", "prompt", prompt=None),
    text("prompt-empty-list", "", "prompt", prompt=[]),
    text("prompt-mixed", "", prompt=["a", 1]),
    text("prompt-negative-token", "", "prompt[0]", prompt=[-1]),
    text("prompt-unknown-token", "not below 257", "prompt", prompt=[1, 257]),
    text("prompt-huge-token", "", prompt=[10**30]),
    text("prompt-float-token", "", prompt=[1.5]),
    text("prompt-bool-token", "", prompt=[True]),
    text("prompt-too-long", "context has 256 tokens", "prompt", prompt="a" * 300),
    text("prompt-and-output-too-long", "may have 200", "prompt", prompt="a" * 100, max_tokens=200),
    text("too-many-prompts", "", "prompt", prompt=["a"] * 1000),
    text("too-many-continuations", "more than 256", "prompt", prompt=["a"] * 200, n=2),
    text("unknown-model", "unknown model", "model", 404, model="gpt-7"),
    text("near-model", "did you mean tiny?", "model", 404, model="tinny"),
    text("model-number", "valid string", "model", model=3),
    text("temperature-negative", "greater than or equal to 0", "temperature", temperature=-0.1),
    text("temperature-high", "less than or equal to 2", "temperature", temperature=2.5),
    text("temperature-text", "valid number", "temperature", temperature="1"),
    text("temperature-bool", "valid number", "temperature", temperature=True),
    text("top-p-negative", "greater than or equal to 0", "top_p", top_p=-0.1),
    text("top-p-high", "less than or equal to 1", "top_p", top_p=1.1),
    text("top-k-low", "", "top_k", top_k=-2),
    text("top-k-float", "", "top_k", top_k=1.5),
    text("min-p", "", "min_p", min_p=2),
    text("n-zero", "", "n", n=0),
    text("n-huge", "", "n", n=10**9),
    text("n-bool", "valid integer", "n", n=True),
    text("best-of", "best_of", best_of=3, n=2),
    text("suffix", "", "suffix", suffix="x"),
    text("max-tokens-negative", "", "max_tokens", max_tokens=-1),
    text("max-tokens-text", "valid integer", "max_tokens", max_tokens="5"),
    text("max-tokens-float", "valid integer", "max_tokens", max_tokens=5.5),
    text("max-tokens-huge", "", "max_tokens", max_tokens=10**12),
    text("seed-huge", "", "seed", seed=2**70),
    text("seed-text", "", "seed", seed="x"),
    text("stop-empty", "", stop=""),
    text("stop-number", "", "stop", stop=3),
    text("stop-many", "", "stop", stop=["a"] * 100),
    text("stop-long", "", stop="a" * 1000),
    text("stop-token", "not below 257", "stop_token_ids", stop_token_ids=[400]),
    text("presence", "", "presence_penalty", presence_penalty=3),
    text("frequency", "", "frequency_penalty", frequency_penalty=-3),
    text("repetition", "greater than 0", "repetition_penalty", repetition_penalty=0),
    text("min-tokens-negative", "greater than or equal to 0", "min_tokens", min_tokens=-1),
    text("min-tokens-many", "more than max_tokens, 5", "min_tokens", min_tokens=6, max_tokens=5),
    text("bad-words-empty", "at least 1 character", "bad_words[0]", bad_words=[""]),
    text("bad-words-many", "", "bad_words", bad_words=["a"] * 200),
    text("prompt-logprobs-many", "", "prompt_logprobs", prompt_logprobs=21),
    text("prompt-logprobs-stream", "set stream to false", prompt_logprobs=1, stream=True),
    text("structure-none", "set exactly one", "structured_outputs", structured_outputs={}),
    text("structure-two", "set exactly one", "structured_outputs", structured_outputs={"regex": "a", "choice": ["a"]}),
    text("structure-unknown", "unknown field", structured_outputs={"yaml": "a"}),
    text("structure-regex", "regex", "structured_outputs.regex", structured_outputs={"regex": "(("}),
    text("structure-choice-empty", "", "structured_outputs.choice", structured_outputs={"choice": []}),
    text(
        "structure-grammar", "grammar", "structured_outputs.grammar", structured_outputs={"grammar": "start: missing"}
    ),
    text("structure-json-text", "JSON schema", "structured_outputs.json", structured_outputs={"json": "{"}),
    text(
        "structure-json-list",
        "it should be a JSON object",
        "structured_outputs.json",
        structured_outputs={"json": "[1]"},
    ),
    text("structure-large", "more than 65536 characters", structured_outputs={"json": {"title": "a" * 70_000}}),
    text("structures", "set only one", structured_outputs={"regex": "a"}, grammar='root ::= "a"'),
    text("grammar", "cannot be used", "grammar", grammar="root ::= missing"),
    text("json-schema", "JSON schema", "json_schema", json_schema={"type": "nothing"}),
    text("bias-key", "", logit_bias={"a": 1}),
    text("bias-negative-key", "", logit_bias={"-1": 1}),
    text("bias-value", "", logit_bias={"1": 101}),
    text("bias-list", "", "logit_bias", logit_bias=[1]),
    text("bias-unknown-token", "not below 257", "logit_bias", logit_bias={"300": 1}),
    text("bias-many", "", "logit_bias", logit_bias={str(i): 1 for i in range(2000)}),
    text("logprobs-many", "", "logprobs", logprobs=100),
    text("logprobs-bool", "", "logprobs", logprobs=True),
    text("stream-text", "valid boolean", "stream", stream="yes"),
    text("stream-options-alone", "set stream to true", stream_options={"include_usage": True}),
    text("stream-options-unknown", "unknown field", stream=True, stream_options={"usage": True}),
    text("user-long", "", "user", user="a" * 300),
    text("user-number", "", "user", user=3),
    text("priority", "", "priority", priority=10**6),
    chat("messages-empty", "", "messages", messages=[]),
    chat("messages-text", "", "messages", messages="hi"),
    chat("message-text", "", "messages[0]", messages=["hi"]),
    chat("role", "", "messages[0].role", messages=[{"role": "robot", "content": "a"}]),
    chat("no-role", "is required", "messages[0].role", messages=[{"content": "a"}]),
    chat("no-content", "content is missing", "messages[0]", messages=[{"role": "user"}]),
    chat("content-number", "", "messages[0].content", messages=[{"role": "user", "content": 1}]),
    chat(
        "image",
        "this model reads only text",
        "messages[0].content[0]",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    chat("context", "context has 256 tokens", "messages", messages=[{"role": "user", "content": "a" * 300}]),
    chat("top-logprobs-alone", "set logprobs to true", top_logprobs=3),
    chat("top-logprobs", "", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("max-tokens-zero", "", "max_completion_tokens", max_completion_tokens=0),
    chat("tools-text", "", "tools", tools="x"),
    chat("tool-type", "", "tools[0].type", tools=[{"type": "web_search", "function": {"name": "f"}}]),
    chat("tool-choice", "has no tools", "tool_choice", tool_choice="required"),
    chat("tool-named", "no tool has the name 'g'; the request has f", "tool_choice", tools=TOOLS, tool_choice=NAMED_G),
    chat("tool-twice", "is 'f', as in tools[0]", "tools[1].function.name", tools=TOOLS * 2),
    chat("tools-ignored", "does not show tools", "tools", tools=TOOLS),
    chat("arguments", "not JSON", "messages[0].tool_calls[0].function.arguments", messages=called('{"a": ')),
    chat("arguments-list", "not a JSON object", messages=called("[1]")),
    chat("legacy-call", "send tool_calls", messages=[{"role": "assistant", "function_call": {"name": "f"}}]),
    chat("effort", "cannot change the reasoning", "reasoning_effort", reasoning_effort="high"),
    chat("budget", "--reasoning-parser", "thinking_token_budget", thinking_token_budget=5),
    chat("options-misspelled", "did you mean messages?", chat_template_kwargs={"mesages": 1}),
    chat("options", "set by the server", "chat_template_kwargs", chat_template_kwargs={"messages": []}),
    chat("continue", "has no text to continue", "messages", messages=[USER_EMPTY], continue_final_message=True),
    chat("format", "", response_format={"type": "xml"}),
    chat("format-text", "", response_format="json"),
    chat("format-without-schema", "", response_format={"type": "json_schema"}),
    schema("schema-type", {"type": "objekt"}, "cannot be used"),
    schema("schema-unmet", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    schema("schema-empty-enum", {"enum": []}, "Unsatisfiable"),
    schema("schema-lengths", {"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
    schema("schema-elsewhere", {"$ref": "http://127.0.0.1:1/schema.json"}, "does not fetch schemas"),
    schema("schema-pattern", {"type": "string", "pattern": "(a"}, "cannot be used"),
    schema("schema-huge", {"type": "string", "enum": ["a" * 100_000]}, "characters", "response_format"),
    Bad("response-previous", RESPONSE, b'{"input": "a", "previous_response_id": "x"}', param="previous_response_id"),
    Bad(
        "response-expired",
        RESPONSE,
        b'{"input": "a", "previous_response_id": "resp_1"}',
        says="no stored response has the id 'resp_1'; its response was created with `store: false`, was deleted, or was evicted",
        param="previous_response_id",
    ),
    Bad("response-item", RESPONSE, b'{"input": [{"type": "computer_call"}]}', says="not supported", param="input[0]"),
    Bad(
        "response-background", RESPONSE, b'{"input": "a", "background": true, "stream": true}', says="does not support"
    ),
    Bad("message-image", MESSAGES, IMAGE_BLOCK, says="reads only text", param=None),
    Bad("message-max-tokens", MESSAGES, b'{"messages": [{"role": "user", "content": "a"}]}', says="max_tokens"),
    Bad("response-input", RESPONSE, b'{"input": 3}', param="input"),
    Bad("response-empty", RESPONSE, b'{"input": []}', param="input"),
    Bad("response-tokens", RESPONSE, b'{"input": "a", "max_output_tokens": 0}', param="max_output_tokens"),
    Bad("response-model", RESPONSE, b'{"input": "a", "model": "x"}', 404, "unknown model", "model"),
    Bad(
        "tokenize-both", "/tokenize", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', says="either"
    ),
    Bad("tokenize-none", "/tokenize", b"{}", says="either"),
    Bad("tokenize-tools", "/tokenize", b'{"prompt": "a", "tools": []}', says="tools is only for messages"),
    Bad("detokenize-unknown", "/detokenize", b'{"tokens": [1, 999]}', says="not below 257", param="tokens[1]"),
    Bad("detokenize-negative", "/detokenize", b'{"tokens": [-1]}', param="tokens[0]"),
    Bad("detokenize-text", "/detokenize", b'{"tokens": "a"}', param="tokens"),
)
