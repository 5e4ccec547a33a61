"""Preferences: a check for rows, and a source that reads rows from JSONL files.

{"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}
"""

from typing import Any, ClassVar

import attrs

from axlearn_core.errors import InputError, nearest
from axlearn_plugins_transformer.text.conversations import ChatFiles, ConversationRecords

FIELDS = ("prompt", "chosen", "rejected")
EXPECTED = '{"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}'


def check_preference(row: Any, location: str) -> None:
    """Raise `InputError` with the `location` unless a row is a prompt with two different answers."""
    for name in FIELDS:
        if name not in row:
            close = nearest(name, row)
            raise InputError(
                f"{location}: has no field {name!r}; its fields: {', '.join(row) or 'none'}"
                + (f"\n    nearest: {', '.join(close)}" if close else "")
                + f"\n    expected: {EXPECTED}"
            )
        if not isinstance(row[name], str):
            raise InputError(f"{location}: {name} is a {type(row[name]).__name__}\n    expected: a string")
    for name in ("chosen", "rejected"):
        if not row[name]:
            raise InputError(
                f"{location}: {name} is empty\n    expected: an answer\n    fix: add an answer, or drop the row"
            )
    if row["chosen"] == row["rejected"]:
        raise InputError(
            f"{location}: chosen and rejected are equal\n    got: {row['chosen'][:60]!r}\n    fix: drop the row"
        )


@attrs.frozen(eq=False)
class PreferenceRecords(ConversationRecords):
    """Random access to rows of preferences. Only the index is in memory."""

    check: ClassVar[Any] = staticmethod(check_preference)


class PreferenceFiles(ChatFiles):
    """Preferences in JSONL files (paths, globs or fsspec URLs), one per line.

    Building the source reads and checks every row. A fraction of the rows, selected by a hash of their content, can be held out.
    """

    records = PreferenceRecords
