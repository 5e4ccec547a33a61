"""Rows of JSONL files, with the location of each error."""

import json
from collections.abc import Iterator
from typing import Any

import attrs

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.data_files import open_data
from axlearn_plugins_transformer.text.fingerprint import DataFile
from axlearn_plugins_transformer.text.records import LINE_BYTES, decode, long_line


@attrs.frozen
class Row:
    """A line with a JSON object.

    Attributes:
        value: The object.
        number: Line number, from 1.
        offset: Byte offset of the line.
        size: Size of the line in bytes.
        location: File and line, for messages.
    """

    value: dict[str, Any]
    number: int
    offset: int
    size: int
    location: str


def rows(file: DataFile) -> Iterator[Row]:
    """Yield the objects of a file in order. Blank lines are skipped.

    Raises:
        InputError: A line is not UTF-8, not JSON or not an object, or all lines are blank.
    """
    offset, has_rows = 0, False
    with open_data(file) as handle:
        for number, raw in enumerate(iter(lambda: handle.readline(LINE_BYTES + 1), b""), 1):
            if raw.strip():
                has_rows = True
                location = f"{file.name}, line {number}"
                if len(raw) > LINE_BYTES:
                    raise long_line(location, LINE_BYTES)
                yield Row(parse(decode(file, offset, raw), location), number, offset, len(raw), location)
            offset += len(raw)
    if not has_rows:
        raise InputError(f"{file.name} has no rows: every line is blank\n    expected: one JSON object per line")


def parse(text: str, location: str) -> dict[str, Any]:
    """Parse the object in a line.

    Raise InputError, prefixed with `location`, for anything else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{location}: is not JSON: {error.msg} at column {error.colno}\n    expected: one JSON object per line"
        ) from None
    except ValueError as error:  # integers with thousands of digits
        raise InputError(f"{location}: has a number that is too long: {error}") from None
    except RecursionError:
        raise InputError(f"{location}: is nested too deeply\n    expected: one JSON object per line") from None
    if not isinstance(value, dict):
        raise InputError(f"{location}: is a {type(value).__name__}\n    expected: one JSON object per line")
    return value
