"""Validators that reject oversized fields before they validate each entry."""

import json
from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

MAX_ENTRIES = 1024
"""Maximum number of entries in a dictionary of uniform values, such as `logit_bias`."""


def check_context(prompt: Any, info: ValidationInfo) -> Any:
    """Reject a list with more token ids than fit into the context, before validating each id."""
    context = (info.context or {}).get("context")
    if context is not None and isinstance(prompt, list) and len(prompt) > context and isinstance(prompt[0], int):
        raise PydanticCustomError(
            "context_length_exceeded",
            "the context has {context} tokens, but the prompt has {length}",
            {"context": context, "length": len(prompt)},
        )
    return prompt


def check_entries(value: Any) -> Any:
    """Reject a dictionary with more than `MAX_ENTRIES` entries.

    The check runs before the entries are validated.
    """
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_many_entries", "{length} entries, more than {limit}", {"length": len(value), "limit": MAX_ENTRIES}
        )
    return value


def exceeds(values: Any, limit: int) -> bool:
    """Return True if the JSON of `values` is longer than `limit` characters.

    Encoding stops at the limit.
    """
    size = 0
    for piece in json.JSONEncoder().iterencode(values):
        size += len(piece)
        if size > limit:
            return True
    return False
