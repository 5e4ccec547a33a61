"""Convert messages into the form that chat templates expect.

Training, evaluation and serving use this module.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the reasoning of an assistant's message. Each template reads one of them."""


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    Null fields are dropped. `content` becomes one string: text parts are joined, and missing content becomes an empty
    string. The arguments of tool calls, which the OpenAI API encodes as a JSON string, become objects. Arguments that are
    not valid JSON stay strings, because a model may have written them. Reasoning is copied to all fields in `REASONING`.
    """
    return [_normalize(message) for message in messages]


def normalize_tools(tools: Any) -> Any:
    """Return function descriptions without null fields.

    The schema of parameters does not change.
    """
    return [_normalize_tool(tool) for tool in tools] if isinstance(tools, list | tuple) else tools


def content_problem(content: Any) -> str | None:
    """Return the problem with the content of a message, or None.

    Valid content is a string, text parts, or null.
    """
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
    if (reasoning := next((fields[name] for name in REASONING if fields.get(name)), None)) is not None:
        fields |= dict.fromkeys(REASONING, reasoning)
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
    """Return a function call whose arguments are an object.

    Null arguments stay, because templates expect the field.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    present = {name: value for name, value in function.items() if value is not None or name == "arguments"}
    return {**present, "arguments": arguments} if "arguments" in present else present


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
