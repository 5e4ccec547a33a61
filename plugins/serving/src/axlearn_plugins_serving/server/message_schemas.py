"""Messages and tools in request bodies."""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from axlearn_plugins_serving.server.body import Body, TemplatePart, choose_by_type, tag
from axlearn_plugins_serving.server.early_checks import exceeds
from axlearn_plugins_serving.server.parameter_schemas import check_parameters
from axlearn_plugins_transformer.text.messages import REASONING, TEXT_PARTS

MAX_TOOL_COUNT = 512
MAX_SCHEMA = 64 * 1024
"""Maximum number of characters in a JSON schema."""
MAX_TOOLS = 512 * 1024
"""Maximum number of characters in the parameters of a request's tools, as JSON."""
MAX_ARGUMENTS = 512 * 1024
"""Maximum number of characters in the arguments of one call, as JSON. Reading more would block other requests."""
_MEDIA = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}
"""Kind of content that models do not read -> its name in messages."""
_log = logging.getLogger("axlearn.serving")
_logged: set[str] = set()


class MessagePart(TemplatePart):
    """A part of a message.

    Unknown fields are ignored and logged once. Fields that carry content are errors, so that nothing is dropped in silence.

    Attributes:
        content_fields: Name of a field that is not supported -> what to send instead.
    """

    content_fields: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _keep_fields(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return handler(fields)
        sent = {name: value for name, value in fields.items() if value is not None}
        for name in [name for name in sent if name not in cls.model_fields]:
            if name in cls.content_fields and sent[name]:
                message = "'{name}' is not supported; {instead}"
                details = {"name": name, "instead": cls.content_fields[name]}
                raise PydanticCustomError("unsupported_content", message, details)
            del sent[name]
            _log_once(cls.__name__, name)
        part = handler(sent)
        part._sent = sent
        return part


def _log_once(owner: str, name: str) -> None:
    if name not in _logged and len(_logged) < 256:
        _logged.add(name)
        _log.warning("ignoring the unknown field %r of a %s", name[:80], owner)


def _check_kind(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        medium = next(medium for medium in _MEDIA if medium in kind)
        message = "the message has {content}, but this model reads only text; remove it"
        raise PydanticCustomError("unsupported_content", message, {"content": _MEDIA[medium]})
    if kind == "refusal" and isinstance(part, dict):
        return {"type": "text", "text": part.get("refusal")}
    return part


class TextPart(MessagePart):
    """A text part of a message. Other kinds (images, audio) are not supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str


assert set(TEXT_PARTS) == {"text", "input_text", "output_text"}
ContentPart = Annotated[TextPart, BeforeValidator(_check_kind)]
Parts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]


def _check_length(arguments: Any) -> Any:
    is_long = len(arguments) > MAX_ARGUMENTS if isinstance(arguments, str) else exceeds(arguments, MAX_ARGUMENTS)
    if is_long:
        message = "the arguments have more than {limit} characters; shorten them"
        raise PydanticCustomError("invalid_arguments", message, {"limit": MAX_ARGUMENTS})
    return arguments


CallArguments = Annotated[dict[str, Any], AfterValidator(_check_length)]
"""The arguments of a call as an object."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


class FunctionCall(MessagePart):
    """A call made by the assistant. `arguments` is an object or its JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def sent_arguments(self) -> str | dict[str, Any]:
        """The arguments that the client sent, or an empty object."""
        if self.arguments is None or (isinstance(self.arguments, str) and not self.arguments.strip()):
            return "{}"
        return self.arguments

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: Any) -> Any:
        _check_length(arguments)
        if isinstance(arguments, str) and arguments.strip():
            try:
                value = json.loads(arguments, parse_constant=_refuse_constant)
            except RecursionError:
                raise ValueError("the arguments are nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"the arguments are not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ValueError("the arguments are not a JSON object")
        return arguments


class ToolCall(MessagePart):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @property
    def template_fields(self) -> dict[str, Any]:
        """The call as the template expects it."""
        function = {**self.function.sent, "arguments": self.function.sent_arguments}
        return {**self.sent, "type": "function", "function": function}


class Message(MessagePart):
    """A message of a conversation."""

    content_fields = {  # noqa: RUF012  # annotated in the base class
        "function_call": "send tool_calls",
        "audio": "this model reads only text",
        "images": "this model reads only text",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=4096, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing; only messages of the assistant may omit it")
        return self

    @property
    def text(self) -> str:
        """The concatenated text parts, or the refusal if there is no text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "".join(part.text for part in self.content)

    @property
    def template_fields(self) -> dict[str, Any]:
        """The message for the chat template, in the order of the client's fields.

        `normalize_messages` converts it further.
        """
        fields = {name: value for name, value in self.sent.items() if name not in ("tool_calls", "refusal")}
        if "content" in fields or self.text:
            fields["content"] = self.text
        if self.tool_calls:
            fields["tool_calls"] = [call.template_fields for call in self.tool_calls]
        return fields


assert set(REASONING) <= set(Message.model_fields)


ToolName = Annotated[str, Field(min_length=1, max_length=128)]
Parameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]
"""The JSON schema of a tool's arguments."""


class FunctionDefinition(TemplatePart):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(TemplatePart):
    """A tool that is passed to the chat template."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a tool."""

    name: ToolName


class NamedTool(Body):
    """A tool choice that requires a call to one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolList(Body):
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOL_COUNT, fail_fast=True)]


class AllowedTools(Body):
    """A tool choice that limits the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ChosenTools = Annotated[
    Annotated[NamedTool, Tag(tag("function"))] | Annotated[AllowedTools, Tag(tag("allowed_tools"))],
    choose_by_type("function", "allowed_tools"),
]


def function_of(tool: Any) -> FunctionDefinition:
    """Return the function of a tool, whether it is nested or not."""
    return tool.function if isinstance(tool, Tool) else tool


def check_schema_size(schema: dict[str, Any]) -> dict[str, Any]:
    """Reject a JSON schema that is too large."""
    if exceeds(schema, MAX_SCHEMA):
        message = "the JSON schema cannot be used: it has more than {limit} characters"
        raise PydanticCustomError("invalid_json_schema", message, {"limit": MAX_SCHEMA})
    return schema


def _check_tools(tools: list[Any]) -> list[Any]:
    functions = [function_of(tool) for tool in tools]
    if exceeds([function.parameters for function in functions], MAX_TOOLS):
        raise PydanticCustomError(
            "invalid_tools",
            "the tools' parameters have more than {limit} characters; shorten them or offer fewer tools",
            {"limit": MAX_TOOLS},
        )
    indices: dict[str, int] = {}
    for second, function in enumerate(functions):
        first = indices.setdefault(function.name, second)
        if first != second:
            place = (second, "function", "name") if isinstance(tools[second], Tool) else (second, "name")
            path = f"tools[{second}]." + ".".join(place[1:])
            message = "{path} is '{name}', as in tools[{first}]; rename one of the tools"
            details = {"path": path, "name": function.name, "first": first, "place": place}
            raise PydanticCustomError("invalid_tools", message, details)
    return tools


T = TypeVar("T")
ToolList = Annotated[list[T], Field(max_length=MAX_TOOL_COUNT, fail_fast=True), AfterValidator(_check_tools)]
