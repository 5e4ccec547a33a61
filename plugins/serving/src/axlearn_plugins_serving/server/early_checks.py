"""Checks of request fields that stop before they have read megabytes."""

import json
from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

MAX_ENTRIES = 1024
"""Of a dictionary with values of one kind, such as `logit_bias`."""


def check_context(prompt: Any, info: ValidationInfo) -> Any:
    """Refuse more token ids than the context has, before each of them is checked."""
    context = (info.context or {}).get("context")
    if context is not None and isinstance(prompt, list) and len(prompt) > context and isinstance(prompt[0], int):
        raise PydanticCustomError(
            "context_length_exceeded",
            "the context has {context} tokens, but the prompt has {length}",
            {"context": context, "length": len(prompt)},
        )
    return prompt


def check_entries(value: Any) -> Any:
    """Refuse a dictionary of more than `MAX_ENTRIES` entries, before each of them is checked."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_many_entries", "{length} entries, more than {limit}", {"length": len(value), "limit": MAX_ENTRIES}
        )
    return value


def exceeds(values: Any, limit: int) -> bool:
    """Whether the JSON of `values` is longer than `limit` characters. Stops writing it there."""
    size = 0
    for piece in json.JSONEncoder().iterencode(values):
        size += len(piece)
        if size > limit:
            return True
    return False
