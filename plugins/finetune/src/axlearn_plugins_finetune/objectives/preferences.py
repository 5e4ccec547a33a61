"""Rows of preferences: their checks, and sources that read them from JSONL files.

{"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}      pairs, for `preference-files`
{"prompt": "2 + 2?", "completion": " 4", "label": true}     labelled answers, for `labelled-files`
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from axlearn_core.errors import InputError, nearest
from axlearn_plugins_transformer.text.conversations import ChatFiles, ConversationRecords

PAIR: Mapping[str, Any] = {"prompt": str, "chosen": str, "rejected": str}
PAIR_EXAMPLE = '{"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}'
LABELLED: Mapping[str, Any] = {"prompt": str, "completion": str, "label": bool}
LABELLED_EXAMPLE = '{"prompt": "2 + 2?", "completion": " 4", "label": true}'


def check_preference(row: Any, location: str) -> None:
    """Raise `InputError` with the `location` unless a row is a prompt with two different answers."""
    _check_fields(row, location, PAIR, PAIR_EXAMPLE)
    _check_answers(row, location, ("chosen", "rejected"))
    if row["chosen"] == row["rejected"]:
        raise InputError(
            f"{location}: chosen and rejected are equal\n    got: {row['chosen'][:60]!r}\n    fix: drop the row"
        )


def check_labelled(row: Any, location: str) -> None:
    """Raise `InputError` with the `location` unless a row is a prompt with an answer and a label."""
    _check_fields(row, location, LABELLED, LABELLED_EXAMPLE)
    _check_answers(row, location, ("completion",))


def _check_fields(row: Any, location: str, fields: Mapping[str, Any], example: str) -> None:
    for name, kind in fields.items():
        if name not in row:
            close = nearest(name, row)
            raise InputError(
                f"{location}: has no field {name!r}; its fields: {', '.join(row) or 'none'}"
                + (f"\n    nearest: {', '.join(close)}" if close else "")
                + f"\n    expected: {example}"
            )
        if not isinstance(row[name], kind):
            expected = "a string" if kind is str else "true or false"
            raise InputError(f"{location}: {name} is a {type(row[name]).__name__}\n    expected: {expected}")


def _check_answers(row: Any, location: str, names: tuple[str, ...]) -> None:
    for name in names:
        if not row[name]:
            raise InputError(
                f"{location}: {name} is empty\n    expected: an answer\n    fix: add an answer, or drop the row"
            )


@attrs.frozen(eq=False)
class PreferenceRecords(ConversationRecords):
    """Random access to pairs of answers. Only the index is in memory."""

    check: ClassVar[Any] = staticmethod(check_preference)


class PreferenceFiles(ChatFiles):
    """Preferences in JSONL files (paths, globs or fsspec URLs), one per line.

    Building the source reads and checks every row. A fraction of the rows, selected by a hash of their content, can be held out.
    """

    records = PreferenceRecords


@attrs.frozen(eq=False)
class LabelledRecords(ConversationRecords):
    """Random access to labelled answers. Only the index is in memory."""

    check: ClassVar[Any] = staticmethod(check_labelled)


class LabelledFiles(ChatFiles):
    """Labelled answers in JSONL files (paths, globs or fsspec URLs), one per line.

    Building the source reads and checks every row. A fraction of the rows, selected by a hash of their content, can be held out.
    """

    records = LabelledRecords
