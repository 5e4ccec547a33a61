"""`AnswerStream`: the output that a parser reads and the pieces that it writes.

A parser is a generator function over an `AnswerStream`. It reads as if the whole output were already available, and yields when it
needs more text. `StreamParser` runs such a function as a `Parser`.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import attrs

from axlearn_plugins_serving.parsers.answer_formats import (
    CallArguments,
    CallStart,
    Function,
    Piece,
    Reasoning,
    Text,
)
from axlearn_plugins_serving.parsers.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A step of a parser. It yields when it needs more text, and returns a value."""
Sink = Callable[[str], None]
"""Receives text that was read."""

MAX_CALL = 4 * 1024 * 1024
"""Length of a call in characters. A longer call is malformed."""
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not a call. The characters that are wrong have not been read."""


class Markers:
    """Strings that are searched together.

    Args:
        texts: The strings.
    """

    def __init__(self, *texts: str):
        ordered = sorted(texts, key=len, reverse=True)
        self._texts = frozenset(texts)
        self._whole = re.compile("|".join(re.escape(text) for text in ordered))
        self._begun = re.compile("|".join(_match_prefixes(text) for text in ordered))

    def search(self, text: str, start: int, *, final: bool) -> tuple[int, str]:
        """Find the first marker.

        Returns:
            The position before which there is no marker, and the marker at this position. The marker is empty if there is none, or
            if the text ends before the marker does and is not `final`.
        """
        match = (self._whole if final else self._begun).search(text, start)
        if not match:
            return len(text), ""
        whole = match.end() < len(text) or final or (self._begins_no_other(match.group()))
        return match.start(), match.group() if match.group() in self._texts and whole else ""

    def _begins_no_other(self, marker: str) -> bool:
        return not any(text != marker and text.startswith(marker) for text in self._texts)


def _match_prefixes(text: str) -> str:
    """Return a pattern that matches the text, or its beginning at the end of the input."""
    pattern = re.escape(text[-1])
    for char in reversed(text[:-1]):
        pattern = f"{re.escape(char)}(?:\\Z|{pattern})"
    return pattern


@attrs.define
class _Call:
    """A call that is being read.

    Attributes:
        read: Text of the call, to return if the call is malformed.
        size: Length of the text.
        start: The first piece, once the name is known.
        arguments: Text of the arguments that has not been returned.
        refused: Whether the call is text, because the function was not offered.
    """

    read: list[str] = attrs.field(factory=list)
    size: int = 0
    start: CallStart | None = None
    arguments: list[str] = attrs.field(factory=list)
    refused: bool = False


class AnswerStream:
    """The output that a parser reads, and the pieces that it returns.

    Blank text next to a call is dropped. Other text is returned unchanged.

    Args:
        functions: The tools that the request offers.
        stream: Whether to return arguments before the call is complete.

    Attributes:
        functions: The tools by name.
        ended: Whether the output is complete.
    """

    def __init__(self, functions: Sequence[Function] = (), *, stream: bool = True):
        self.functions = {function.name: function for function in functions}
        self.ended = False
        self._stream = stream
        self._buffer, self._at = "", 0
        self._pieces: list[Piece] = []
        self._index = 0
        self._call: _Call | None = None
        self._blank: list[str] | None = []  # blank text that may be dropped; None after other text

    # Text in.

    def feed(self, text: str) -> None:
        """Append text to the output."""
        self._buffer, self._at = self._buffer[self._at :] + text, 0

    def take(self, count: int) -> str:
        """Read the next characters. They must have arrived."""
        call = self._call
        if call and not call.refused:
            call.size += count
            if call.size > MAX_CALL:
                raise Malformed
        text = self._buffer[self._at : self._at + count]
        self._at += count
        if call and call.refused:
            self.text(text)
        elif call and (not call.start or not self._stream):
            call.read.append(text)
        return text

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. It is empty at the end of the output."""
        while self._at == len(self._buffer) and not self.ended:
            yield
        return self._buffer[self._at : self._at + 1]

    def starts_with(self, *texts: str) -> Steps[str]:
        """Return the text that comes next, without reading it. Return an empty string if there is another text."""
        while True:
            for text in texts:
                if self._buffer.startswith(text, self._at):
                    return text
            rest = self._buffer[self._at : self._at + max(map(len, texts))]
            if self.ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def accept(self, *texts: str) -> Steps[str]:
        """Read one of the texts if it comes next. Return it, or an empty string."""
        text = yield from self.starts_with(*texts)
        return self.take(len(text))

    def expect(self, *texts: str) -> Steps[str]:
        """Read one of the texts. Raise `Malformed` if another text comes next."""
        text = yield from self.accept(*texts)
        if not text:
            raise Malformed
        return text

    def expect_or_end(self, text: str) -> Steps[None]:
        """Read the text, if it is not left out because the output ends."""
        if (yield from self.peek()):
            yield from self.expect(text)

    def match(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Steps[None]:
        """Read characters as long as a pattern such as `[a-z]*` matches."""
        while True:
            run = pattern.match(self._buffer, self._at)
            text = self.take(run.end() - self._at if run else 0)
            if sink and text:
                sink(text)
            if self._at < len(self._buffer) or self.ended:
                return
            yield

    def space(self) -> Steps[None]:
        """Read whitespace."""
        yield from self.match(_SPACE)

    def separator(self, text: str) -> Steps[bool]:
        """Read whitespace and the text after a call. If the text does not follow, the whitespace belongs to the answer."""
        spaces = yield from self.read(_SPACE)
        if (yield from self.accept(text)):
            return True
        if not self._call:
            self.text(spaces)
        return False

    def read(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return the characters that a pattern such as `[a-z]*` matches."""
        parts: list[str] = []
        yield from self.match(pattern, parts.append)
        return "".join(parts)

    def read_count(self, count: int) -> Steps[str]:
        """Read and return the next characters. There are fewer at the end of the output."""
        while len(self._buffer) - self._at < count and not self.ended:
            yield
        return self.take(min(count, len(self._buffer) - self._at))

    def until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Read text up to the next marker. Return the marker without reading it, or an empty string at the end."""
        while True:
            end, marker = markers.search(self._buffer, self._at, final=self.ended)
            if end > self._at:
                sink(self.take(end - self._at))
            if marker or self.ended:
                return marker
            yield

    def json(self, sink: Sink) -> Steps[None]:
        """Read a JSON value. Raise `Malformed` if it is not valid or not complete."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._buffer, self._at, final=self.ended)
            if end > self._at:
                sink(self.take(end - self._at))
            if scanner.complete:
                return
            if scanner.failed or self.ended:
                raise Malformed
            yield

    def json_string(self) -> Steps[str]:
        """Read a JSON string. Return its value."""
        if (yield from self.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self.json(parts.append)
        return json.loads("".join(parts))

    # Pieces out.

    def text(self, text: str) -> None:
        """Write text of the answer."""
        if self._blank is not None:
            self._blank.append(text)
            if not text or text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._pieces.append(Text(text))

    def reasoning(self, text: str) -> None:
        """Write text of the reasoning."""
        self._pieces.append(Reasoning(text))

    def begin(self) -> None:
        """Begin a call. Text that is read from now on belongs to it."""
        self._call = _Call()

    def start(self, name: str, id: str | None = None) -> None:
        """Write the name of the call. If the function was not offered, the call becomes text."""
        call = self._current
        if name not in self.functions:
            call.refused = True
            for text in call.read:
                self.text(text)
            return
        call.start = CallStart(self._index, name, id)
        if self._stream:
            self._blank = []
            self._pieces.append(call.start)
            call.read.clear()

    def arguments(self, text: str) -> None:
        """Write JSON text of the arguments."""
        call = self._current
        if call.refused:
            return
        if self._stream:
            self._pieces.append(CallArguments(self._index, text))
        else:
            call.arguments.append(text)

    def commit(self) -> None:
        """End a call that is well-formed. If it became text, so does the text up to the next call or `leave`."""
        call = self._current
        if call.refused:
            return
        if not call.start:
            raise Malformed
        if not self._stream:
            self._blank = []
            self._pieces += [call.start, CallArguments(self._index, "".join(call.arguments))]
        self._index += 1
        self._call = None

    def fail(self) -> None:
        """End a call that is malformed. It becomes text, unless its beginning has been returned."""
        call, self._call = self._call, None
        if not call or call.refused:
            return
        if call.start and self._stream:
            self._index += 1
            return
        for text in call.read:
            self.text(text)

    def leave(self) -> None:
        """Leave the calls. Text that is read from now on belongs to the answer."""
        self._call = None

    @property
    def _current(self) -> _Call:
        if not self._call:
            raise RuntimeError("no call has begun\n    fix: call `begin` before the other methods of calls")
        return self._call

    def finish(self) -> None:
        """Return blank text, unless it follows a call."""
        if self._blank and not self._index:
            self._pieces.append(Text("".join(self._blank)))
        self._blank = None

    def drain(self) -> list[Piece]:
        """Return the pieces that were written since the last time. Neighbors of one kind are joined."""
        groups: list[tuple[Any, list[str]]] = []
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            kind = (type(piece), piece.index if isinstance(piece, CallArguments) else None)
            if isinstance(piece, CallStart):
                groups.append((piece, []))
            elif groups and groups[-1][0] == kind:
                groups[-1][1].append(piece.text)
            else:
                groups.append((kind, [piece.text]))
        return [piece for head, texts in groups if (piece := _join(head, "".join(texts)))]


def _join(head: Any, text: str) -> Piece | None:
    if isinstance(head, CallStart):
        return head
    kind, index = head
    if not text:
        return None
    return CallArguments(index, text) if kind is CallArguments else kind(text)


class StreamParser:
    """Runs a generator function as a `Parser`.

    Args:
        read: Reads the output and writes its pieces. It returns at the end of the output.
        functions: The tools that the request offers.
        stream: Whether to return arguments before the call is complete.
    """

    def __init__(
        self, read: Callable[[AnswerStream], Steps[None]], functions: Sequence[Function] = (), *, stream: bool = True
    ):
        self._stream = AnswerStream(functions, stream=stream)
        self._steps = read(self._stream)

    def push(self, text: str) -> list[Piece]:
        """See `Parser.push`."""
        self._stream.feed(text)
        next(self._steps, None)
        return self._stream.drain()

    def end(self) -> list[Piece]:
        """See `Parser.end`."""
        self._stream.ended = True
        next(self._steps, None)
        self._stream.finish()
        return self._stream.drain()
