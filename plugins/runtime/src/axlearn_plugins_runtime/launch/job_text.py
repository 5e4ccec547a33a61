"""Options that are one line of text."""

from typing import Any

import attrs


def single_line(instance: object, attribute: "attrs.Attribute[str | None]", value: str | None) -> None:
    """A validator: a line break in an option would become a line of the script."""
    if value is not None and not value.isprintable():
        raise ValueError(f"{attribute.name} has characters that do not print: {value!r}")


def line(default: str | None = None) -> Any:
    """A field for one line of text."""
    return attrs.field(default=default, validator=single_line)
