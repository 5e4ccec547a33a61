"""Tool calls that the request requires: their grammar, and a parser of their text."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Piece, Text
from axlearn_plugins_serving.server.conversation import ToolUse
from axlearn_plugins_serving.server.structured_outputs import JSON_OPTIONS

MAX_CALLS = 128
_HEAD = re.compile(r'\{"name":("(?:[^"\\]|\\.)*"),"arguments":$')


def forced_grammar(use: ToolUse) -> str:
    """Return the Lark grammar of the text that stands for the required calls.

    The arguments alone stand for a call to a named tool. Otherwise, the text is a list of objects with `name` and `arguments`. Each
    function has a JSON schema of its own, so references in a schema keep their meaning.
    """
    if use.named:
        return f"start: {_arguments(use.functions[0].parameters)}"
    most = MAX_CALLS - 1 if use.parallel else 0
    rules = [f'start: "[" call ("," call){{0,{most}}} "]"' if most else 'start: "[" call "]"']
    heads = {}
    for i, function in enumerate(use.functions):
        heads[f'{{"name":{json.dumps(function.name, ensure_ascii=False)},"arguments":'] = f"end_{i}"
        rules += [f'end_{i}: arguments_{i} "}}"', f"arguments_{i}: {_arguments(function.parameters)}"]
    return "\n".join([*rules, *_prefix_rules("call", heads)])


def _prefix_rules(name: str, continuations: Mapping[str, str]) -> Iterator[str]:
    """Yield rules for a choice of texts. No text may be the beginning of another.

    The alternatives of each rule begin with different characters. The work for a token grows with the number of alternatives, and
    the limits allow 200 of them, so a rule with one alternative for each tool would fail.

    Args:
        name: Name of the first rule.
        continuations: Text -> rule that follows it.
    """
    groups: dict[str, dict[str, str]] = {}
    for text, rule in continuations.items():
        groups.setdefault(text[0], {})[text] = rule
    alternatives = []
    for i, group in enumerate(groups.values()):
        prefix = os.path.commonprefix(list(group))  # noqa: RUF071  # of texts, not of paths
        rule = f"{name}_{i}"
        if len(group) == 1:
            (rule,) = group.values()
        else:
            yield from _prefix_rules(rule, {text[len(prefix) :]: rest for text, rest in group.items()})
        alternatives.append(f"{json.dumps(prefix, ensure_ascii=False)} {rule}")
    yield f"{name}: {' | '.join(alternatives)}"


def _arguments(parameters: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**parameters, "type": "object", "x-guidance": JSON_OPTIONS})


class ForcedCallParser:
    """A parser of the text that `forced_grammar` describes.

    The grammar guarantees the syntax, so the parser only looks for the beginning and the end of each call's arguments. If the
    output ends early, the arguments of the last call are incomplete.

    Args:
        use: The tools of the request.
    """

    def __init__(self, use: ToolUse):
        self._named = use.functions[0].name if use.named else None
        self._index = -1
        self._depth = 0
        self._in_string = self._escaped = False
        self._in_arguments = use.named
        self._head = ""

    def push(self, text: str) -> list[Piece]:
        """See `Parser.push`."""
        pieces: list[Piece] = []
        if self._named is not None and self._index < 0 and text:
            self._index = 0
            pieces.append(CallStart(0, self._named))
        position = 0
        while position < len(text):
            if self._in_arguments:
                stop = self._find_end(text, position)
                pieces.append(CallArguments(self._index, text[position:stop]))
                position = stop
            else:
                position = self._read_head(text, position, pieces)
        return pieces

    def end(self) -> list[Piece]:
        """See `Parser.end`."""
        return [Text(self._head)] if self._index < 0 and self._head else []

    def _find_end(self, text: str, start: int) -> int:
        """Return the position after the arguments in `text`, or its length if they continue."""
        for i in range(start, len(text)):
            character = text[i]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._in_arguments = self._named is not None
                    return i + 1
        return len(text)

    def _read_head(self, text: str, start: int, pieces: list[Piece]) -> int:
        """Read up to the arguments of the next call. Return the position after the text that was read."""
        stop = text.find(":", start) + 1 or len(text)
        self._head += text[start:stop]
        if match := _HEAD.search(self._head):
            self._index += 1
            pieces.append(CallStart(self._index, json.loads(match.group(1))))
            self._head, self._in_arguments = "", True
        return stop
