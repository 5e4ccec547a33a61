"""Rendering of conversations: the variables of the chat template, and the continuation of the last message."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from axlearn_core.errors import nearest
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.conversation import Conversation
from axlearn_plugins_transformer.text.chat_template import ChatTemplate, RenderedChat

SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that switches the reasoning on or off. Each template reads at most one of them."""


MARK = "\ufdd3"
"""A noncharacter that marks the end of the message to continue."""


@attrs.frozen
class RenderedPrompt:
    """A conversation as text and as tokens."""

    text: str
    tokens: list[int]


def template_options(variables: Collection[str], conversation: Conversation) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Args:
        variables: Names of the variables that the template reads.
        conversation: The conversation.

    Raises:
        ApiError: 400 if the template ignores the tools or the effort of the reasoning, or if an option is misspelled.
    """
    if conversation.use.tools and "tools" not in variables:
        message = (
            "tools: the model's chat template does not show tools to the model, so it cannot call them; remove them, or start "
            "the server with a --chat-template that does"
        )
        raise ApiError(400, message, param="tools", code="template_ignores_tools")
    for name in conversation.options:
        if name not in variables and (close := nearest(name, variables)):
            message = (
                f"chat_template_kwargs.{name}: the chat template does not read it; did you mean {', '.join(close)}?"
            )
            raise ApiError(400, message, param=f"chat_template_kwargs.{name}")
    options = dict(conversation.options)
    effort = conversation.effort
    if effort is None:
        return options
    switch = next((name for name in SWITCHES if name in variables), None)
    if "reasoning_effort" in variables and not (effort == "none" and switch):
        return {"reasoning_effort": effort, **options}
    if switch is None and (conversation.is_effort_optional or effort == "medium"):
        return options  # "medium" is the default of OpenAI's API
    if switch is None:
        message = f"reasoning_effort: the model's chat template cannot change the reasoning; got {effort!r}"
        raise ApiError(400, message, param="reasoning_effort", code="template_ignores_reasoning")
    return {switch: effort != "none", **options}


def render_conversation(template: ChatTemplate, conversation: Conversation, options: Mapping[str, Any]) -> RenderedChat:
    """Render a conversation.

    Args:
        template: Chat template of the model.
        conversation: The conversation.
        options: Further variables of the template.

    Raises:
        InputError: The template rejects the conversation.
        ApiError: 400 if the last message cannot be continued.
    """
    messages = [fit_role(message, template.source) for message in conversation.messages]
    tools = list(conversation.use.tools) or None
    if not conversation.continues:
        return template.render(
            messages, prompt=conversation.prompt, tools=tools, options=options, location=conversation.param
        )
    text = str(messages[-1].get("content") or "").strip() if messages else ""
    marked = [*messages[:-1], {**messages[-1], "content": text + MARK}] if text else []
    rendered = template.render(marked, tools=tools, options=options, location=conversation.param).text if text else ""
    position = rendered.rfind(MARK)
    if position < 0:
        message = f"{conversation.param}: the last message has no text to continue, or the chat template changes it"
        raise ApiError(400, message, param=conversation.param)
    return RenderedChat(rendered[:position])


def fit_role(message: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return a message with the role `system` instead of `developer` if the template does not know that role."""
    if message.get("role") == "developer" and "developer" not in source:
        return {**message, "role": "system"}
    return message
