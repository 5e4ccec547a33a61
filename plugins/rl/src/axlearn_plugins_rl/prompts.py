"""Checks of examples, and the tokens of their prompts."""

import json
from typing import Any

from axlearn_core.errors import InputError
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_transformer.text.conversations import check_conversation
from axlearn_plugins_transformer.text.processor import TextProcessor


def encode_prompt(text: TextProcessor, example: Example) -> list[int]:
    """Encode the prompt of an example for a model.

    A text is encoded like any text to continue. Messages are rendered by the model's chat template, up to the beginning of
    the answer. Templates that ask for the date get a fixed one, so that the same example always has the same tokens.

    Args:
        text: The text processor of the model.
        example: The example.

    Returns:
        Token ids; at least one.

    Raises:
        InputError: The chat template rejects the messages.
    """
    if isinstance(example.prompt, str):
        return text.encode_prompt(example.prompt)
    rendered = text.data_template.render(
        example.prompt,
        prompt=True,
        tools=list(example.tools) or None,
        location=f"the prompt of the example {example.id}",
    )
    return text.encode_rendered(rendered)


def show_prompt(example: Example) -> str:
    """Return the prompt as text for people. Each message begins with its role."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in example.prompt)


def check_example(example: Example, location: str) -> Example:
    """Return an example after checking it.

    Args:
        example: The example.
        location: Where it comes from. It begins the error message.

    Raises:
        InputError: The prompt is empty or is neither text nor messages, the text is not valid Unicode, or the answer is not a
            JSON value.
    """
    if not isinstance(example, Example):
        raise InputError(f"{location}: is a {type(example).__name__}\n    expected: an Example")
    if isinstance(example.prompt, str):
        if not example.prompt:
            raise InputError(f"{location}: the prompt is empty\n    expected: a text to continue, or messages")
    else:
        messages = [*example.prompt] if isinstance(example.prompt, (tuple, list)) else example.prompt
        check_conversation({"messages": messages}, location, answered=False)
    _check_text(example, location)
    return example


def content(example: Example) -> dict[str, Any]:
    """Return the prompt, the answer and the tools of an example as JSON values."""
    prompt = example.prompt if isinstance(example.prompt, str) else [dict(message) for message in example.prompt]
    fields: dict[str, Any] = {"prompt": prompt, "answer": example.answer}
    return fields | ({"tools": [dict(tool) for tool in example.tools]} if example.tools else {})


def content_key(example: Example) -> str:
    """Return the `content` of an example as JSON text with sorted keys. Equal examples have equal keys."""
    return json.dumps(content(example), sort_keys=True)


def _check_text(example: Example, location: str) -> None:
    try:
        json.dumps(content(example), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{location}: has text that is not valid Unicode\n    got: {error.object[error.start : error.end]!r}\n"
            "    expected: text without lone surrogates"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{location}: cannot be written as JSON: {error}\n    got: {repr(example.answer)[:80]}\n"
            "    expected: an answer of texts, numbers, lists and objects"
        ) from None
