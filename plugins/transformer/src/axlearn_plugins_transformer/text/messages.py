"""Messages of a conversation in the form that chat templates expect. Training, evaluation and serving all use it."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_PARTS = ("text", "input_text", "output_text")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    A field that is null says nothing and is left out. `content` becomes one string: parts of text are joined, and a
    message without content has an empty one. The arguments of tool calls, which the OpenAI API writes as a string of JSON,
    become objects; what is not JSON stays a string, since a model wrote it.
    """
    return [_normalize(message) for message in messages]


def normalize_tools(tools: Any) -> Any:
    """Return descriptions of functions without fields that are null. A schema of parameters stays as it is."""
    return [_normalize_tool(tool) for tool in tools] if isinstance(tools, list | tuple) else tools


def content_problem(content: Any) -> str | None:
    """What is wrong with the content of a message, or None: it may be a string, parts of text, or null."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"is a {type(content).__name__}"
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            return f"part {i} is not text"
    return None


def _normalize(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = _without_nulls(message)
    content = fields.get("content", "")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    fields["content"] = content
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [_normalize_call(call) for call in calls]
    return fields


def _normalize_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    fields = _without_nulls(call)
    function = fields.get("function")
    if isinstance(function, Mapping):
        fields["function"] = _with_object(function)
    elif "arguments" in call:
        fields = _with_object(call)
    return fields


def _normalize_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    fields = _without_nulls(tool)
    if isinstance(function := fields.get("function"), Mapping):
        fields["function"] = _without_nulls(function)
    return fields


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as an object; arguments that are null stay, as templates expect some."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    present = {name: value for name, value in function.items() if value is not None or name == "arguments"}
    return {**present, "arguments": arguments} if "arguments" in present else present


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
