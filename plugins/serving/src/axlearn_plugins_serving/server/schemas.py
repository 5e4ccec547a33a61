"""Request bodies.

Each body is a pydantic model, which defines the validation, errors with field paths, and the JSON schema in the OpenAPI document.
Unknown fields and unsupported values are errors. A null field counts as absent, even if its name is unknown.

Validation stops at the first wrong item of a list and rejects oversized dictionaries up front, because a body of several megabytes
could have millions of errors.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from axlearn_plugins_serving.server.body import Body, choose_by_type, field_error, tag
from axlearn_plugins_serving.server.early_checks import MAX_ENTRIES, check_context, check_entries, exceeds
from axlearn_plugins_serving.server.encoded_arrays import EncodedArray
from axlearn_plugins_serving.server.message_schemas import (
    MAX_SCHEMA,
    MAX_TOOL_COUNT,
    ChosenTools,
    FunctionDefinition,
    Message,
    Tool,
    ToolList,
    ToolName,
    check_schema_size,
)
from axlearn_plugins_serving.server.response_items import Item
from axlearn_plugins_serving.server.structured_outputs import GrammarSource, GrammarText, StructuredOutputs

MAX_CHOICES = 32
MAX_LOGPROBS = 20
MAX_TEXTS = 2048
"""Maximum number of texts to embed in one request, as in OpenAI's API."""
MAX_BAD_WORDS = 128
MAX_EXTRAS = 64


def check_token_key(key: str) -> str:
    """Reject a key that is not a token id."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key, re.ASCII):
        raise ValueError("the keys are token ids, such as '1234'")
    return key


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(check_context)]
TokenKey = Annotated[str, AfterValidator(check_token_key)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Reject variables that the server sets, and options that are too large."""
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in options:
            raise ValueError(f"{name} is set by the server; send it as a field of the request")
    if exceeds(options, MAX_SCHEMA):
        raise ValueError(f"the options have more than {MAX_SCHEMA} characters")
    return options


Metadata = Annotated[dict[str, str], Field(max_length=MAX_ENTRIES), BeforeValidator(check_entries)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
TemplateOptions = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(check_options)]


class StreamOptions(Body):
    """Options for a stream.

    `continuous_usage_stats` adds the usage so far to each event.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # without effect


class JsonSchema(Body):
    """A JSON schema with a name. The output matches it even if `strict` is not set."""

    name: Annotated[str, Field(max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object. `schema` (llama.cpp) or `value` (Hugging Face) may set its JSON schema."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    value: dict[str, Any] | None = None

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema, or None if any object is allowed."""
        return self.value if self.schema_ is None else self.schema_

    @property
    def schema_path(self) -> str:
        """Path of the schema in the request."""
        return "response_format.value" if self.schema_ is None else "response_format.schema"


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema
    _schema_path: str = PrivateAttr("response_format.json_schema.schema")

    @property
    def schema_path(self) -> str:
        """Path of the schema in the request."""
        return self._schema_path

    @classmethod
    def from_schema(cls, name: str, schema: dict[str, Any], path: str) -> "JsonSchemaFormat":
        """Return the format for a schema at another path of a request."""
        format = cls(type="json_schema", json_schema=JsonSchema(name=name, schema=schema))
        format._schema_path = path
        return format


def _check_schema(format: Any) -> Any:
    schema = format.json_schema if isinstance(format, JsonSchemaFormat) else format
    value = schema.json_schema if isinstance(schema, JsonObjectFormat) else None
    value = schema.schema_ if isinstance(schema, JsonSchema) else value
    if value is not None:
        check_schema_size(value)
    return format


ResponseFormat = Annotated[
    Annotated[
        Annotated[TextFormat, Tag(tag("text"))]
        | Annotated[JsonObjectFormat, Tag(tag("json_object"))]
        | Annotated[JsonSchemaFormat, Tag(tag("json_schema"))],
        choose_by_type("text", "json_object", "json_schema"),
    ],
    AfterValidator(_check_schema),
]


def _check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    if options is not None and not stream:
        raise field_error("stream_options", "stream_options needs a stream: set stream to true")


class SamplingFields(Body):
    """Fields that all generating endpoints share.

    Extensions of the OpenAI API: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `bad_words`, `ignore_eos`, `stop_token_ids`,
    `include_stop_str_in_output`, `skip_special_tokens`, `prompt_logprobs`, `return_token_ids`, `structured_outputs` and `priority`
    as in vLLM, `json_schema` and `grammar` as in llama.cpp, and `extras`.

    Accepts `length_penalty` 1, `use_beam_search` false and `cache_prompt` true, because they describe what the server does, and
    ignores `request_id`: send the header `X-Request-Id` instead.

    Attributes:
        user: Name of the user. Waiting users of the same priority take turns.
        priority: Smaller values run first.
        extras: Other inputs of the model than tokens, by name. The request must have a single prompt.
    """

    model: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    logit_bias: (
        Annotated[
            dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_ENTRIES),
            BeforeValidator(check_entries),
        ]
        | None
    ) = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: GrammarText | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None  # other values need beam search
    use_beam_search: Literal[False] | None = None
    cache_prompt: Literal[True] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    extras: Annotated[dict[str, EncodedArray], Field(max_length=MAX_EXTRAS), BeforeValidator(check_entries)] | None = (
        None
    )

    @model_validator(mode="after")
    def _check_stream(self) -> "SamplingFields":
        _check_stream_options(self.stream_options, self.stream)
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "prompt_logprobs does not support streams: set stream to false")
        return self

    @model_validator(mode="after")
    def _check_constraints(self) -> "SamplingFields":
        constraints = {
            "grammar": self.grammar,
            "json_schema": self.json_schema,
            "structured_outputs": self.structured_outputs,
            "response_format": None if isinstance(self.response_format, TextFormat) else self.response_format,
        }
        names = [name for name, constraint in constraints.items() if constraint is not None]
        if len(names) > 1:
            raise field_error(names[0], f"set only one of {', '.join(constraints)}")
        if exceeds(self.json_schema, MAX_SCHEMA):
            raise field_error("json_schema", f"json_schema has more than {MAX_SCHEMA} characters")
        return self

    @property
    def grammar_source(self) -> GrammarSource | None:
        """The grammar that `structured_outputs`, `json_schema` or `grammar` requests, or None."""
        if self.structured_outputs is not None:
            return self.structured_outputs.source
        if self.json_schema is not None:
            return GrammarSource("json", self.json_schema, "json_schema")
        return None if self.grammar is None else GrammarSource("grammar", self.grammar, "grammar")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`.

    The prompt is a string, a list of strings, a list of token ids, or a list of lists of token ids.
    """

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=256, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=256, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 16
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise field_error("best_of", "best_of must equal n")
        return self


def _check_continuation(continues: bool | None, adds_prompt: bool | None) -> None:
    if continues and adds_prompt:
        message = "continue_final_message continues the last message, so add_generation_prompt must be false"
        raise field_error("continue_final_message", message)


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`.

    Ignores `store`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key` and `prompt_cache_retention`.

    Extensions of the OpenAI API: `include_reasoning`, `thinking_token_budget`, `chat_template_kwargs`, `add_generation_prompt`,
    `continue_final_message`.

    Attributes:
        include_reasoning: Whether to return the reasoning. The model reasons in any case.
        thinking_token_budget: Maximum number of tokens of the reasoning. After them, the server ends the reasoning.
        chat_template_kwargs: Further variables of the chat template, such as `enable_thinking`.
        continue_final_message: Whether to continue the last message instead of answering it.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None  # the default of OpenAI's API
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs: set logprobs to true")
        _check_continuation(self.continue_final_message, self.add_generation_prompt)
        return self


class ResponseJsonSchema(JsonSchema):
    """`JsonSchemaFormat` without nesting."""

    type: Literal["json_schema"]


class ResponseText(Body):
    """The text format of a response."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag(tag("text"))]
            | Annotated[JsonObjectFormat, Tag(tag("json_object"))]
            | Annotated[ResponseJsonSchema, Tag(tag("json_schema"))],
            choose_by_type("text", "json_object", "json_schema"),
            AfterValidator(_check_schema),
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None  # the default of OpenAI's API


class ResponseTool(FunctionDefinition):
    """`Tool` without nesting."""

    type: Literal["function"]


class ResponseToolName(Body):
    """A tool choice that requires a call to one tool."""

    type: Literal["function"]
    name: ToolName


class ResponseAllowedTools(Body):
    """A tool choice that limits the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolName], Field(min_length=1, max_length=MAX_TOOL_COUNT, fail_fast=True)]


ResponseChosenTools = Annotated[
    Annotated[ResponseToolName, Tag(tag("function"))] | Annotated[ResponseAllowedTools, Tag(tag("allowed_tools"))],
    choose_by_type("function", "allowed_tools"),
]


class ReasoningOptions(Body):
    """Options for the reasoning. `summary` is ignored: the whole reasoning is returned."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseInput(Body):
    """Fields of `/v1/responses` and `/v1/responses/input_tokens` that make up the prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    tools: ToolList[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseChosenTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: ResponseText | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    conversation: None = None


class ResponseRequest(ResponseInput):
    """`POST /v1/responses`.

    Ignores `metadata` except for returning it, `service_tier`, `safety_identifier`, `prompt_cache_key` and
    `prompt_cache_retention`. `include` only affects log-probabilities: the reasoning is always returned as text, and the other
    values belong to tools that this server does not have.

    Attributes:
        store: Whether to store the response, so that `previous_response_id` can continue it (default: true, as in OpenAI's API).
        background: Whether to return at once and to compute the response later. Needs `store`.
        ignore_eos: Whether to continue after the end token (an extension, for benchmarks).
    """

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    store: bool = True
    background: bool | None = None
    ignore_eos: bool = False
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check_background(self) -> "ResponseRequest":
        if self.background and (not self.store or self.stream):
            raise field_error("background", "background: true does not support store: false or stream: true")
        _check_stream_options(self.stream_options, self.stream)
        return self


class ResponseInputTokens(ResponseInput):
    """`POST /v1/responses/input_tokens`."""


class EmbeddingRequest(Body):
    """`POST /v1/embeddings`.

    The input is a string, a list of strings, a list of token ids, or a list of lists of token ids. `priority` is an extension.
    """

    model: Annotated[str, Field(max_length=512)] | None = None
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0


class LoadAdapterRequest(Body):
    """`POST /v1/load_lora_adapter`.

    Attributes:
        lora_name: Name under which clients request the adapter.
        lora_path: Directory on the server that `axlearn lora export` wrote.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeRequest(Body):
    """`POST /tokenize`.

    The input is text, or a conversation with tools that the chat template renders.

    Attributes:
        add_special_tokens: Whether to add the tokenizer's BOS token to a prompt (default: true). For conversations, the chat
            template writes the special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("messages", "pass either prompt or messages")
        of_messages = {
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning_effort,
        }
        for name, value in of_messages.items():
            if self.messages is None and value is not None:
                raise field_error(name, f"{name} is only for messages: omit it if there is a prompt")
        if self.add_special_tokens and self.messages is not None:
            raise field_error(
                "add_special_tokens",
                "add_special_tokens needs a prompt: the chat template writes the special tokens of messages",
            )
        _check_continuation(self.continue_final_message, self.add_generation_prompt)
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
