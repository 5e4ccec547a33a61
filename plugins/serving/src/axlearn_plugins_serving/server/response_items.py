"""Items of `/v1/responses`, and their conversion to the messages of a conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from axlearn_plugins_serving.server.body import tag
from axlearn_plugins_serving.server.message_schemas import FunctionCall, MessagePart, Parts

_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class InputMessage(MessagePart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class FunctionCallItem(FunctionCall):
    """A call that the model made in an earlier answer."""

    type: Literal["function_call"]
    call_id: str


class FunctionOutputItem(MessagePart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningText(MessagePart):
    """A part of the reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(MessagePart):
    """The reasoning of an earlier answer. Only `content` is shown to the model."""

    content_fields = {  # noqa: RUF012  # annotated in the base class
        "encrypted_content": "this server returns the reasoning as text in content",
    }

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=4096, fail_fast=True)] | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=4096, fail_fast=True)] | None = None


class ItemReference(MessagePart):
    """An item of a stored response's output, by its id."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=256)]


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else item.type
    return "message" if kind is None else kind


def _tag(item: Any) -> str:
    return tag(_kind(item))


def _check_kind(item: Any) -> Any:
    if not isinstance(item, dict):
        raise PydanticCustomError("dict_type", "Input should be an object")
    if (kind := _kind(item)) not in _KINDS:
        message = "items of the type '{kind}' are not supported; this server reads {kinds}"
        raise PydanticCustomError("unsupported_item", message, {"kind": str(kind)[:80], "kinds": ", ".join(_KINDS)})
    return item


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag(tag("message"))]
        | Annotated[FunctionCallItem, Tag(tag("function_call"))]
        | Annotated[FunctionOutputItem, Tag(tag("function_call_output"))]
        | Annotated[ReasoningItem, Tag(tag("reasoning"))]
        | Annotated[ItemReference, Tag(tag("item_reference"))],
        Discriminator(_tag),
    ],
    BeforeValidator(_check_kind),
]

_ITEM: TypeAdapter[Any] = TypeAdapter(Item)
_READ = ("type", "role", "content", "summary", "call_id", "name", "arguments", "output")
"""Fields of stored items that the model is shown."""


def parse_item(item: dict[str, Any]) -> Any:
    """Return a stored item as an object. Its other fields, such as the status, are for clients.

    Raises:
        ValidationError: The item is not complete.
    """
    fields = {name: item[name] for name in _READ if name in item}
    if isinstance(parts := fields.get("content"), list):
        fields["content"] = [{name: part[name] for name in ("type", "text") if name in part} for part in parts]
    return _ITEM.validate_python(fields)


def item_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages that items stand for.

    The reasoning, the text and the calls of one answer become one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            text = _text(item.content)
            if (
                item.role == "assistant"
                and "content" not in (last := _assistant(messages))
                and "tool_calls" not in last
            ):
                last["content"] = text
            else:
                messages.append({"role": item.role, "content": text})
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.sent_arguments}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, ReasoningItem) and item.content:
            messages.append({"role": "assistant", "reasoning_content": "".join(part.text for part in item.content)})
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, else append one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
