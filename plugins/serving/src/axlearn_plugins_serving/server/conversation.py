"""`Conversation`: what a request asks, in the form that all chat endpoints share."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from axlearn_plugins_serving.parsers.answer_formats import Function
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.message_schemas import AllowedTools, NamedTool

Mode = Literal["auto", "none", "required"]


@attrs.frozen(kw_only=True)
class ToolUse:
    """The tools of a request, and how the model may use them.

    Attributes:
        tools: Descriptions for the chat template.
        functions: The functions that the model may call.
        mode: `none` forbids calls, `required` forces at least one.
        named: Whether the only function must be called exactly once.
        parallel: Whether an answer may have several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    mode: Mode = "none"
    named: bool = False
    parallel: bool = True


@attrs.frozen(kw_only=True)
class Conversation:
    """Messages to answer.

    Attributes:
        messages: Messages for `normalize_messages`.
        use: The tools.
        options: Further variables of the chat template.
        prompt: Whether to append the beginning of the assistant's answer.
        continues: Whether to continue the last message instead of answering it.
        effort: How much the model should reason. None leaves it to the template.
        is_effort_optional: Whether to ignore `effort` if the template cannot change the reasoning.
        budget: Maximum number of tokens of the reasoning.
        param: Name of the messages in errors.
    """

    messages: Sequence[Mapping[str, Any]]
    use: ToolUse = ToolUse()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    prompt: bool = True
    continues: bool = False
    effort: str | None = None
    is_effort_optional: bool = False
    budget: int | None = None
    param: str = "messages"


def choose_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: Mode | NamedTool | AllowedTools | None,
    parallel: bool | None,
    *,
    path: str = "function.parameters",
) -> ToolUse:
    """Return the tools that a request offers.

    Args:
        tools: Tools in the form of the chat API.
        choice: The request's `tool_choice`.
        parallel: The request's `parallel_tool_calls`.
        path: Path of the arguments' schema in each of the request's tools, for errors.

    Raises:
        ApiError: 400 if the choice needs a tool that the request does not have.
    """
    names = [tool["function"]["name"] for tool in tools]
    chosen: list[str] = names
    mode: Mode
    if isinstance(choice, NamedTool):
        chosen, mode = [choice.function.name], "required"
    elif isinstance(choice, AllowedTools):
        chosen, mode = [tool.function.name for tool in choice.allowed_tools.tools], choice.allowed_tools.mode
    else:
        mode = choice or "auto"
    for name in chosen:
        if name not in names:
            offered = f"the request has {', '.join(names)}" if names else "the request has no tools"
            raise ApiError(400, f"tool_choice: no tool has the name {name!r}; {offered}", param="tool_choice")
    if mode == "required" and not chosen:
        raise ApiError(400, "tool_choice: a call is required, but the request has no tools", param="tool_choice")
    if mode == "none" or not chosen:
        return ToolUse()
    offered = [(i, tool) for i, tool in enumerate(tools) if tool["function"]["name"] in chosen]
    functions = tuple(
        Function(tool["function"]["name"], tool["function"].get("parameters") or {}, f"tools[{i}].{path}")
        for i, tool in offered
    )
    return ToolUse(
        tools=tuple(tool for _, tool in offered),
        functions=functions,
        mode=mode,
        named=isinstance(choice, NamedTool),
        parallel=parallel is not False,
    )
