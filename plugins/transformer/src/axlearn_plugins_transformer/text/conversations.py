"""Conversations: their validation, and the source that reads them from JSONL files.

{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import InputError, Problem, nearest
from axlearn_plugins_transformer.text.data_files import list_files, open_data
from axlearn_plugins_transformer.text.fingerprint import DataFile
from axlearn_plugins_transformer.text.jsonl_rows import rows
from axlearn_plugins_transformer.text.messages import content_problem
from axlearn_plugins_transformer.text.records import Document, decode
from axlearn_plugins_transformer.text.sources import Part, Split, check_paths, is_held_out, many

ROLES = ("system", "developer", "user", "assistant", "tool")


@attrs.frozen
class Conversation(Document):
    """A row of conversation data. `text` is its JSON.

    Attributes:
        location: File and line of the row.
    """

    location: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The row: `messages`, and `tools` if it has them."""
        return json.loads(self.text)


def check_conversation(row: Any, location: str, *, answered: bool = True) -> None:
    """Raise InputError if a row is not a conversation.

    Args:
        row: The JSON object of a line.
        location: Prefix of the error message.
        answered: Require a message from the assistant.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        close = nearest("messages", row)
        raise InputError(
            f"{location}: the field 'messages' is not a list of messages; fields: {', '.join(row) or 'none'}"
            + (f"\n    nearest: {', '.join(close)}" if close else "")
            + '\n    expected: {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    for i, message in enumerate(messages):
        prefix = f"{location}: messages[{i}]"
        if not isinstance(message, dict):
            raise InputError(f"{prefix} is a {type(message).__name__}\n    expected: an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            close = nearest(str(role), ROLES)
            raise InputError(
                f"{prefix} has the role {role!r}"
                + (f"\n    did you mean: {', '.join(close)}?" if close else "")
                + f"\n    expected: one of {', '.join(ROLES)}"
            )
        content = message.get("content")
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise InputError(f"{prefix} has no text in 'content'\n    got: {content!r}\n    expected: a string")
        if problem := content_problem(content):
            raise InputError(
                f"{prefix}: content {problem}\n    got: {repr(content)[:80]}\n    expected: a string, or a list of text parts"
            )
    if answered and not any(m["role"] == "assistant" for m in messages):
        raise InputError(
            f"{location}: has no message from the assistant, so there is nothing to learn\n"
            f"    got: {', '.join(m['role'] for m in messages)}\n    fix: add an answer, or remove the row"
        )


@attrs.frozen(eq=False)
class ConversationRecords:
    """Random access to conversations: record `i` is one line of file `owners[i]`.

    Only the index is in memory.

    A subclass with a different `check` can read other kinds of rows.

    Attributes:
        files: The files.
        owners: Index of each record's file, int32.
        numbers: Line number of each record, from 1, int32.
        offsets: Byte offset of each line, int64.
        sizes: Size of each line in bytes, int64.
    """

    check: ClassVar[Callable[[Any, str], None]] = staticmethod(check_conversation)
    """Raises InputError if a row (the first argument) is invalid. The second argument names its file and line."""

    files: tuple[DataFile, ...]
    owners: np.ndarray
    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @classmethod
    def from_files(
        cls,
        files: Sequence[DataFile],
        keep: Callable[[str], bool] = lambda line: True,
        check: Callable[[Any, str], None] | None = None,
    ) -> "ConversationRecords":
        """Read every file once and check every row.

        Args:
            files: The files.
            keep: Returns True for the content of the rows to return.
            check: Used instead of the class's `check`.
        """
        check, entries = check or cls.check, []
        for owner, file in enumerate(files):
            for row in rows(file):
                check(row.value, row.location)
                if keep(json.dumps(row.value, sort_keys=True)):
                    entries.append((owner, row.number, row.offset, row.size))
        columns = np.array(entries, np.int64).reshape(-1, 4).T
        return cls(tuple(files), columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2], columns[3])

    def __len__(self) -> int:
        return len(self.owners)

    def select(self, mask: np.ndarray) -> "ConversationRecords":
        """Return the records for which `mask`, one bool per record, is True."""
        columns = ("owners", "numbers", "offsets", "sizes")
        return attrs.evolve(self, **{name: getattr(self, name)[mask] for name in columns})

    @property
    def num_bytes(self) -> int:
        """Size of all rows, in bytes."""
        return int(self.sizes.sum())

    def __getitem__(self, index: Any) -> Sequence[Document]:
        file = self.files[int(self.owners[index])]
        offset = int(self.offsets[index])
        with open_data(file) as handle:
            handle.seek(offset)
            raw = handle.read(int(self.sizes[index]))
        return (Conversation(decode(file, offset, raw), location=self.name(index)),)

    def name(self, index: int) -> str:
        """Return `FILE, line N`."""
        return f"{self.files[int(self.owners[index])].name}, line {int(self.numbers[index])}"


class ChatFiles(Configurable):
    """Conversations in JSONL files from paths, globs and fsspec URLs, one per line.

    Building the source reads and checks every row. A share of the conversations can be held out by a hash of their
    content, so duplicates are always on the same side.
    """

    @node
    class Config(Configurable.Config["ChatFiles"]):
        """Settings for the files.

        Validation data is in separate files, or a fraction of the conversations of `paths`.

        Attributes:
            paths: Paths, globs or URLs of training files.
            validation_paths: Paths, globs or URLs of validation files.
            validation_fraction: Share of the conversations in `paths` to hold out.
        """

        paths: str | tuple[str, ...] = ()
        validation_paths: str | tuple[str, ...] = ()
        validation_fraction: float = setting(default=0.0, ge=0, lt=1)

        def validate(self) -> Iterable[Problem]:
            """Check that there is data, and at most one way to hold some out."""
            return check_paths(self.paths, self.validation_paths, self.validation_fraction)

    records: ClassVar[type[ConversationRecords]] = ConversationRecords

    def check(self, row: Any, location: str) -> None:
        """Raise `InputError` with the `location` if a row is invalid. A subclass can read other kinds of rows."""
        self.records.check(row, location)

    def __init__(self, cfg: Config):
        fraction = cfg.validation_fraction
        trained, held_out = list_files(many(cfg.paths)), list_files(many(cfg.validation_paths))
        self._parts: dict[Split, tuple[Part, ...]] = {
            "train": self._part(trained, lambda row: not is_held_out(row, fraction)),
            "validation": self._part(trained, lambda row: is_held_out(row, fraction))
            if fraction
            else self._part(held_out),
        }

    def parts(self, split: Split) -> tuple[Part, ...]:
        """Return one part with the conversations of the split."""
        return self._parts[split]

    def _part(self, files: tuple[DataFile, ...], keep: Callable[[str], bool] = lambda row: True) -> tuple[Part, ...]:
        records = self.records.from_files(files, keep, self.check)
        return (Part(records, 1.0, files),) if len(records) else ()
