"""The bodies of responses, for the OpenAPI document. The endpoints make plain dictionaries: a stream has thousands of them."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class TokenLogprob(BaseModel):
    """A token's log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """The same with the likeliest tokens at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[ContentLogprob]
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class OutputText(BaseModel):
    """A part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(BaseModel):
    """What the assistant says."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage
    store: Literal[False]


class Tokens(BaseModel):
    """The answer of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """The answer of `/detokenize`."""

    prompt: str


class Model(BaseModel):
    """A model; `parent` is the base of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    parent: str | None


class Models(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "draining", "failed"]


class EngineStatistics(BaseModel):
    """State and counters of the engine, as `/metrics` has them."""

    model: str
    state: Literal["ok", "draining", "failed"]
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
