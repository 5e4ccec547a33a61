"""Evaluation data: texts, conversations, and questions with choices.

The fields of a row determine its kind:

{"text": "..."}                                                              perplexity of the text
{"messages": [{"role": "user", "content": "..."}, ...]}                      perplexity of the assistant's messages
{"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}                    accuracy of the most likely choice
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from axlearn_core.errors import InputError, nearest
from axlearn_plugins_transformer.text.conversations import check_conversation
from axlearn_plugins_transformer.text.data_files import is_url, list_files
from axlearn_plugins_transformer.text.fingerprint import DataFile
from axlearn_plugins_transformer.text.jsonl_rows import Row, rows
from axlearn_plugins_transformer.text.records import FileRecords, check_head, find_format

Kind = Literal["text", "chat", "choices"]


@attrs.frozen
class Question:
    """A prompt and the choices that may follow it.

    Attributes:
        prompt: Text before the choice. May be empty.
        choices: At least two texts.
        answer: Index of the correct choice.
        delimiter: Text between the prompt and a choice.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int
    delimiter: str = " "


@attrs.frozen
class Data:
    """Rows of one kind.

    Attributes:
        kind: Kind of all rows.
        items: Texts, rows with messages, or `Question`s.
        places: File and line of each row, for use in error messages.
    """

    kind: Kind
    items: tuple[Any, ...]
    places: tuple[str, ...]


def read(pattern: str, *, text_field: str = "text", limit: int | None = None) -> Data:
    """Return the rows of files. All rows must be of the same kind.

    Args:
        pattern: A path, a glob or a URL. Each JSONL line or Parquet row is one row. Any other file is one text.
        text_field: Field that holds the text in JSONL and Parquet rows.
        limit: Maximum number of rows.

    Raises:
        InputError: If there are no rows or a row is invalid. The message names the file and line.
    """
    items: list[tuple[Kind, Any, str]] = []
    for file in list_files((pattern,)):
        for item in _items(file, text_field):
            if items and item[0] != items[0][0]:
                raise InputError(
                    f"{item[2]}: the row has {_KINDS[item[0]]}, but earlier rows have {_KINDS[items[0][0]]}\n"
                    "    expected: rows of one kind\n"
                    "    fix: pass the other rows as a separate --data"
                )
            items.append(item)
            if limit is not None and len(items) >= limit:
                return _data(items)
    if not items:
        raise InputError(f"{pattern} has no rows")
    return _data(items)


_KINDS: dict[Kind, str] = {"text": "text", "chat": "messages", "choices": "choices"}


def _data(items: Sequence[tuple[Kind, Any, str]]) -> Data:
    return Data(items[0][0], tuple(i for _, i, _ in items), tuple(p for *_, p in items))


def _items(file: DataFile, text_field: str) -> Iterator[tuple[Kind, Any, str]]:
    kind = find_format(file.path)
    if kind == "jsonl":
        for row in rows(file):
            yield _item(row, text_field)
        return
    if kind == "text" and not is_url(file.path):
        check_head(file)
    records = FileRecords.from_files([file], text_field=text_field, chunk_bytes=max(file.size, 1))
    for i in range(len(records)):
        for document in records[i]:
            if document.text:
                yield "text", document.text, records.name(i)


def _item(row: Row, text_field: str) -> tuple[Kind, Any, str]:
    value = row.value
    if "messages" in value:
        check_conversation(value, row.location)
        return "chat", value, row.location
    if "choices" in value or "prompt" in value:
        return "choices", question(value, row.location), row.location
    text = value.get(text_field)
    if not isinstance(text, str) or not text:
        fields = ("messages", "choices", text_field)
        close = [name for key in value for name in nearest(key, fields, limit=1)]
        raise InputError(
            f"{row.location}: the row has nothing to score; its fields: {', '.join(value) or 'none'}\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + f"    expected: text in {text_field!r}, or 'messages', or 'prompt', 'choices' and 'answer'"
        )
    return "text", text, row.location


def question(value: dict[str, Any], location: str) -> Question:
    """Return the question in a row.

    Raises:
        InputError: If a field is missing or invalid. The message begins with `location`.
    """
    prompt, choices, answer = (value.get(name) for name in ("prompt", "choices", "answer"))
    delimiter = value.get("delimiter", " ")

    def wrong(message: str, got: Any, expected: str) -> InputError:
        return InputError(f"{location}: {message}\n    got: {got!r}\n    expected: {expected}")

    if not isinstance(prompt, str) or not isinstance(delimiter, str):
        raise wrong("a question needs text in 'prompt' and 'delimiter'", (prompt, delimiter), "two strings")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise wrong("a question needs 'choices'", choices, "a list of two or more non-empty strings")
    if "answer" not in value:
        raise InputError(
            f"{location}: the question has no 'answer'; its fields: {', '.join(value)}\n"
            "    expected: the index of the correct choice, from 0, or the choice itself"
        )
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise wrong(
            "the 'answer' is not one of the choices",
            answer,
            f"an index from 0 to {len(choices) - 1}, or one of {choices}",
        )
    return Question(prompt, tuple(choices), answer, delimiter)
