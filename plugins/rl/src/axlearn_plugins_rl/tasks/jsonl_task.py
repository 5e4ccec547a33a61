"""The `jsonl-task` component: examples in JSONL files.

{"prompt": "2 + 2 = ", "answer": "4"}
{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_core.config import node
from axlearn_core.errors import InputError, Problem, nearest
from axlearn_plugins_rl.patterns import last_match, pattern_problems
from axlearn_plugins_rl.prompts import check_example
from axlearn_plugins_rl.rollout_contracts import Example, Split
from axlearn_plugins_rl.tasks.generated_task import LazyExamples
from axlearn_plugins_transformer.text import sources
from axlearn_plugins_transformer.text.conversations import (
    ChatFiles,
    Conversation,
    ConversationRecords,
    check_conversation,
)


class JsonlTask(ChatFiles):
    """Examples in JSONL files from paths, globs and fsspec URLs, one per line.

    A row has a `prompt` or `messages`, and an `answer`. It may have an `id` and `tools`. Building the task reads and checks every
    row. A share of the rows can be held out by a hash of their content, so duplicates are always on the same side.
    """

    @node
    class Config(ChatFiles.Config):
        """Settings for the files and the names of their fields.

        Attributes:
            prompt_field: Field with the text to continue. Rows with `messages` do not need it.
            answer_field: Field with the reference answer. Rows without it have no answer.
            answer_pattern: Regular expression that finds the answer in the field, such as `#### (.*)`. The last match counts. If
                it has a group, the first group is the answer. None uses the whole field.
        """

        prompt_field: str = "prompt"
        answer_field: str = "answer"
        answer_pattern: str | None = None

        def validate(self) -> Iterable[Problem]:
            """Check the paths and the pattern."""
            yield from super().validate()
            yield from pattern_problems("answer_pattern", self.answer_pattern)

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg
        super().__init__(cfg)
        if not self.parts("train"):
            raise InputError(
                "the task has no examples for training\n"
                f"    got: paths={cfg.paths!r}, validation_fraction={cfg.validation_fraction:g}\n"
                "    fix: set paths, or lower validation_fraction"
            )

    def check(self, row: Any, location: str) -> None:
        """Raise `InputError` with the `location` unless a row is an example."""
        self._read_row(row, location)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split. They are read from the files when they are indexed."""
        parts = self.parts("validation" if split == "held_out" else "train")
        if not parts:
            return ()
        records = parts[0].records
        assert isinstance(records, ConversationRecords)

        def read(index: int) -> Example:
            (document,) = records[index]
            assert isinstance(document, Conversation)
            return self._read_row(document.row, document.location)

        return LazyExamples(read, np.arange(len(records)))

    def describe(self) -> Mapping[str, Any]:
        """Return facts about the files; see `axlearn_plugins_transformer.text.sources.describe`."""
        return sources.describe(self)

    def _read_row(self, row: Mapping[str, Any], location: str) -> Example:
        cfg = self.config
        if "messages" in row:
            check_conversation(row, location, answered=False)
            prompt: Any = tuple(row["messages"])
        elif cfg.prompt_field in row:
            prompt = row[cfg.prompt_field]
            if not isinstance(prompt, str):
                raise InputError(
                    f"{location}: {cfg.prompt_field} is a {type(prompt).__name__}\n    expected: a string, or messages in the "
                    "field 'messages'"
                )
        else:
            raise _missing_field(row, cfg.prompt_field, location)
        tools = row.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InputError(f"{location}: tools is not a list of objects\n    got: {repr(tools)[:80]}")
        example = Example(
            id=str(row.get("id", location)), prompt=prompt, answer=self._answer(row, location), tools=tuple(tools)
        )
        return check_example(example, location)

    def _answer(self, row: Mapping[str, Any], location: str) -> Any:
        pattern, answer = self.config.answer_pattern, row.get(self.config.answer_field)
        if pattern is None:
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        if (match := last_match(re.compile(pattern), text)) is None:
            raise InputError(
                f"{location}: answer_pattern does not match the field {self.config.answer_field!r}\n    got: {text[-80:]!r}\n"
                f"    expected: a match of {pattern!r}"
            )
        return match


def _missing_field(row: Mapping[str, Any], name: str, location: str) -> InputError:
    close = nearest(name, row)
    return InputError(
        f"{location}: has no field {name!r}; its fields: {', '.join(row) or 'none'}"
        + (f"\n    nearest: {', '.join(close)}" if close else "")
        + '\n    expected: {"prompt": "2 + 2 = ", "answer": "4"}, or {"messages": [...], "answer": "4"}'
        + "\n    fix: set prompt_field to the field with the prompt"
    )
