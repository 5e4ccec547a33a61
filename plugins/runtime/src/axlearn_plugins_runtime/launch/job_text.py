"""Launcher options that hold a single line of text."""

from typing import Any

import attrs


def single_line(instance: object, attribute: "attrs.Attribute[str | None]", value: str | None) -> None:
    """Validate an option that is written into a script. A line break would add a line to the script."""
    if value is not None and not value.isprintable():
        raise ValueError(f"{attribute.name} has unprintable characters: {value!r}")


def line(default: str | None = None) -> Any:
    """Return a field that holds a single line of text."""
    return attrs.field(default=default, validator=single_line)
