"""Response bodies, for the OpenAPI document.

The endpoints build plain dictionaries, which are faster in long streams.
"""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """The details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetail


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CompletionLogprobs(BaseModel):
    """Log-probabilities, with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """The log-probability of a token of the prompt, or of one of the most likely tokens at its position."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(BaseModel):
    """One continuation.

    The last three fields are only present if the request asks for them.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The response of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CalledFunction(BaseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Embedding(BaseModel):
    """The embedding of a text: numbers, or their float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The response of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class AnswerMessage(BaseModel):
    """The assistant's message. `tool_calls` and `reasoning_content` are left out if they are empty."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] = []
    reasoning_content: str = ""


class TokenLogprob(BaseModel):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token with its log-probability and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities, with one entry per token."""

    content: list[ContentLogprob]
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(BaseModel):
    """The assistant's message."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoningText(BaseModel):
    """The text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """The reasoning before the answer."""

    type: Literal["reasoning"]
    id: str
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputCall(BaseModel):
    """A tool call. `arguments` is JSON text."""

    type: Literal["function_call"]
    id: str
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """The response of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    store: bool


class DeletedResponse(BaseModel):
    """The response of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(BaseModel):
    """The response of `/v1/responses/{id}/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class InputTokens(BaseModel):
    """The response of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageUsage(BaseModel):
    """Token counts of `/v1/messages`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(BaseModel):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageErrorDetail(BaseModel):
    """The details of an error of `/v1/messages`."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class MessageErrorBody(BaseModel):
    """The body of an error response of `/v1/messages`."""

    type: Literal["error"]
    error: MessageErrorDetail


class Tokens(BaseModel):
    """The response of `/tokenize`. `token_strs` is the text of each token, if the request asks for it."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Version(BaseModel):
    """The version of `axlearn-plugins-serving`."""

    version: str


class Sleeping(BaseModel):
    """Whether the server sleeps."""

    is_sleeping: bool


class Load(BaseModel):
    """The number of unfinished requests."""

    server_load: int


class Text(BaseModel):
    """The response of `/detokenize`."""

    prompt: str


class Model(BaseModel):
    """A model. `parent` is the base model of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    parent: str | None


class Models(BaseModel):
    """The response of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """The state of the server. Only `ok` accepts requests."""

    status: Literal["ok", "sleeping", "draining", "failed"]


class EngineStatistics(BaseModel):
    """The state and counters of the engine, as in `/metrics`."""

    model: str
    state: Literal["ok", "sleeping", "draining", "failed"]
    start_compilations: int
    waiting: int
    running: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    compilations: int
    step_seconds: float
    host_seconds: float
    drafted_tokens: int
    accepted_tokens: int
    drafter: str | None
