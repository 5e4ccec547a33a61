"""Request bodies of `/v1/messages`, the API of Anthropic."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from axlearn_plugins_serving.server.body import Body, read_tag, tag
from axlearn_plugins_serving.server.message_schemas import (
    CallArguments,
    MessagePart,
    Parameters,
    ToolList,
    ToolName,
    check_schema_size,
)

_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_MEDIA = ("image", "document", "search_result", "container_upload")


class TextBlock(MessagePart):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(MessagePart):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(MessagePart):
    """Reasoning that only Anthropic's servers can read. It is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MessagePart):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: CallArguments


def _check_block(block: Any) -> Any:
    if not isinstance(block, dict):
        raise PydanticCustomError("dict_type", "Input should be an object")
    if (kind := block.get("type")) in _MEDIA:
        message = "the message has a block of the type '{kind}', but this model reads only text; remove it"
        raise PydanticCustomError("unsupported_content", message, {"kind": kind})
    if kind not in _KINDS:
        message = "blocks of the type '{kind}' are not supported; remove them"
        raise PydanticCustomError("unsupported_item", message, {"kind": str(kind)[:80]})
    return block


Texts = Annotated[list[TextBlock], Field(max_length=4096, fail_fast=True)]
ResultBlock = Annotated[TextBlock, BeforeValidator(_check_block)]


class ToolResultBlock(MessagePart):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(max_length=4096, fail_fast=True)] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag(tag("text"))]
        | Annotated[ThinkingBlock, Tag(tag("thinking"))]
        | Annotated[RedactedThinkingBlock, Tag(tag("redacted_thinking"))]
        | Annotated[ToolUseBlock, Tag(tag("tool_use"))]
        | Annotated[ToolResultBlock, Tag(tag("tool_result"))],
        Discriminator(read_tag),
    ],
    BeforeValidator(_check_block),
]


class AnthropicMessage(MessagePart):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=4096, fail_fast=True)]


class AnthropicTool(MessagePart):
    """A tool. Tools that Anthropic's servers run, such as `web_search`, are not supported."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.input_schema


class AnthropicToolChoice(Body):
    """Tool choice: whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required if type is tool, and not allowed otherwise")
        return self


class Thinking(Body):
    """Whether the model reasons, and the maximum number of tokens of the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], AfterValidator(check_schema_size)] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the answer, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thread(Body):
    """A conversation that the server would keep. This server keeps none, so the client sends all messages again."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class RequestMetadata(Body):
    """Describes the request."""

    user_id: Annotated[str, Field(max_length=256)] | None = None


class MessageTokensRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | Texts | None = None
    tools: ToolList[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Thread | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(MessageTokensRequest):
    """`POST /v1/messages`.

    Ignores `service_tier`, `context_management` and `cache_control`: prefixes are always cached. A `thread` is never continued, so
    clients send the whole conversation.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16, fail_fast=True)]
        | None
    ) = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
