"""Formats that write arguments as literals of another language: Llama 4 in Python, and Gemma 4 in its own notation.

The literals are rewritten as JSON while they arrive.
"""

import ast
import json
import math
import re

from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Sink, Steps
from axlearn_plugins_serving.parsers.argument_types import escape
from axlearn_plugins_serving.parsers.json_calls import SequentialFormat, read_call_object
from axlearn_plugins_serving.parsers.json_scanner import MAX_DEPTH, is_json
from axlearn_plugins_serving.parsers.marked_calls import MarkedCalls

_IDENTIFIER = re.compile(r"[\w.-]*")
_WORD = re.compile(r"[\w.+-]*")
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]{1,3}")
_MAX_NUMBER = 100
"""Length of a number in a notation that JSON lacks, such as `0x10`."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""} | {
    c: c for c in "\\'\""
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def read_python_literal(stream: AnswerStream, write: Sink, depth: int = 0) -> Steps[None]:
    """Read a Python literal, and write it as JSON.

    Args:
        stream: The output.
        write: Receives the JSON text.
        depth: Nesting of the literal.

    Raises:
        Malformed: If there is no literal, or it has no equivalent in JSON.
    """
    first = yield from stream.peek()
    if first and first in "\"'":
        write('"')
        yield from _read_python_string(stream, write)
        write('"')
    elif first in _CLOSERS:
        yield from _read_python_container(stream, write, depth + 1)
    else:
        write(_word_to_json((yield from stream.read(_WORD))))


def _word_to_json(word: str) -> str:
    """Convert a number or a constant."""
    if word in _WORDS:
        return _WORDS[word]
    if is_json(word):
        return word
    if word[:1].isalpha() or word.startswith("_") or len(word) > _MAX_NUMBER:
        raise Malformed
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        raise Malformed from None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed
    return json.dumps(value)


def _read_python_container(stream: AnswerStream, write: Sink, depth: int) -> Steps[None]:
    if depth > MAX_DEPTH:
        raise Malformed
    opener = stream.take(1)
    closer = _CLOSERS[opener]
    write("{" if opener == "{" else "[")
    count = 0
    yield from stream.space()
    while not (yield from stream.accept(closer)):
        if count:
            write(", ")
        if opener == "{":
            if (yield from stream.peek()) not in ("'", '"'):
                raise Malformed
            yield from read_python_literal(stream, write, depth)
            yield from stream.space()
            yield from stream.expect(":")
            write(": ")
            yield from stream.space()
        yield from read_python_literal(stream, write, depth)
        yield from _skip_comma(stream, closer)
        count += 1
    write("}" if opener == "{" else "]")


def _skip_comma(stream: AnswerStream, closer: str) -> Steps[None]:
    """Read a comma. It may be missing before the closing bracket."""
    yield from stream.space()
    if not (yield from stream.accept(",")) and not (yield from stream.starts_with(closer)):
        raise Malformed
    yield from stream.space()


def _read_python_string(stream: AnswerStream, write: Sink) -> Steps[None]:
    """Read a string, and write the inside of a JSON string."""
    quote = stream.take(1)
    if (yield from stream.accept(quote * 2)):
        quote *= 3
    elif (yield from stream.accept(quote)):
        return
    markers = Markers(quote, "\\")
    while (yield from stream.until(markers, lambda text: write(escape(text)))) == "\\":
        yield from stream.expect("\\")
        yield from _read_escape(stream, write)
    yield from stream.expect(quote)


def _read_escape(stream: AnswerStream, write: Sink) -> Steps[None]:
    char = yield from stream.peek()
    if not char:
        raise Malformed
    if char in _ESCAPES:
        write(escape(_ESCAPES[stream.take(1)]))
    elif char in "xuU":
        stream.take(1)
        digits = yield from stream.read_count({"x": 2, "u": 4, "U": 8}[char])
        if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
            raise Malformed
        write(json.dumps(chr(int(digits, 16)))[1:-1])  # in ASCII, because half of a surrogate pair cannot be encoded
    elif char in "01234567":
        digits = stream.take(1)
        while len(digits) < 3 and (yield from stream.peek()) in tuple("01234567"):
            digits += stream.take(1)
        write(json.dumps(chr(int(digits, 8)))[1:-1])
    else:
        write("\\\\")  # Python keeps a backslash that does not begin an escape sequence


class Llama4(SequentialFormat):
    """`[f(a=1), g(b="x")]`, as in Llama 4 and Llama 3.2.

    The list begins the output, or follows `<|python_start|>`. Objects as in Llama 3 are accepted too, since the published template
    asks for them.
    """

    special_tokens = ("<|python_start|>", "<|python_end|>")
    marker = "<|python_start|>"

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<|header_start|>" in template

    def read(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read`."""
        stream.text((yield from stream.read(re.compile(r"\s*"))))
        if (yield from stream.peek()) in ("[", "{"):
            yield from self.read_attempt(stream)
        yield from super().read(stream)

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read_calls`."""
        yield from stream.accept(self.marker)
        yield from stream.space()
        if (yield from stream.peek()) == "{":
            yield from read_call_object(stream, strict=True)
            stream.commit()
        else:
            yield from read_python_calls(stream)
        yield from stream.accept("<|python_end|>")


class Lfm2(SequentialFormat):
    """`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`, as in LFM2."""

    special_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    marker = "<|tool_call_start|>"

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return self.marker in template

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read_calls`."""
        yield from stream.expect(self.marker)
        yield from stream.space()
        yield from read_python_calls(stream)
        yield from stream.accept("<|tool_call_end|>")


def read_python_calls(stream: AnswerStream) -> Steps[None]:
    """Read a list of calls in Python's syntax. The first call has begun before the list."""
    yield from stream.expect("[")
    while True:
        yield from stream.space()
        name = yield from stream.read(_IDENTIFIER)
        yield from stream.expect("(")
        yield from _read_keywords(stream, name)
        stream.commit()
        yield from stream.space()
        if not (yield from stream.accept(",")):
            break
        yield from stream.space()
        if (yield from stream.starts_with("]")):
            break
        stream.begin()
    yield from stream.accept("]")


def _read_keywords(stream: AnswerStream, name: str) -> Steps[None]:
    """Read keyword arguments up to the closing bracket, and write a call."""
    keys: set[str] = set()
    yield from stream.space()
    while not (yield from stream.accept(")")):
        key = yield from stream.read(_IDENTIFIER)
        yield from stream.space()
        yield from stream.expect("=")
        yield from stream.space()
        if not key or key in keys:
            raise Malformed
        if not keys:
            stream.start(name)
        stream.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        yield from read_python_literal(stream, stream.arguments)
        yield from _skip_comma(stream, ")")
    if not keys:
        stream.start(name)
    stream.arguments("}" if keys else "{}")


class Gemma(MarkedCalls):
    """`<|tool_call>call:NAME{key:VALUE}<tool_call|>`, as in Gemma 4.

    Keys have no quotes, and `<|"|>` encloses strings.
    """

    call = ("<|tool_call>", "<tool_call|>")
    quote = '<|"|>'
    special_tokens = (*call, quote)
    _bare = re.compile(r"[^,:{}\[\]<]*")

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return self.call[0] in template and self.quote in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        yield from stream.space()
        yield from stream.expect("call:")
        name = yield from stream.read(_IDENTIFIER)
        if (yield from stream.peek()) != "{":
            raise Malformed
        stream.start(name)
        yield from self._read_container(stream, 1)
        yield from stream.space()

    def _read_value(self, stream: AnswerStream, depth: int) -> Steps[None]:
        if (yield from stream.starts_with(self.quote)):
            yield from self._read_string(stream)
        elif (yield from stream.peek()) in ("{", "["):
            yield from self._read_container(stream, depth + 1)
        else:
            word = (yield from stream.read(self._bare)).strip()
            if not word:
                raise Malformed
            constant = _WORDS.get(word, word)
            stream.arguments(constant if is_json(constant) else json.dumps(word, ensure_ascii=False))

    def _read_container(self, stream: AnswerStream, depth: int) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        opener = stream.take(1)
        stream.arguments(opener)
        count = 0
        yield from stream.space()
        while not (yield from stream.accept(_CLOSERS[opener])):
            if count:
                stream.arguments(", ")
            if opener == "{":
                yield from self._read_key(stream)
            yield from self._read_value(stream, depth)
            yield from _skip_comma(stream, _CLOSERS[opener])
            count += 1
        stream.arguments(_CLOSERS[opener])

    def _read_key(self, stream: AnswerStream) -> Steps[None]:
        if (yield from stream.starts_with(self.quote)):
            yield from self._read_string(stream)
        else:
            key = (yield from stream.read(self._bare)).strip()
            stream.arguments(json.dumps(key, ensure_ascii=False))
        yield from stream.space()
        yield from stream.expect(":")
        stream.arguments(": ")
        yield from stream.space()

    def _read_string(self, stream: AnswerStream) -> Steps[None]:
        yield from stream.expect(self.quote)
        stream.arguments('"')
        yield from stream.until(Markers(self.quote), lambda text: stream.arguments(escape(text)))
        yield from stream.expect(self.quote)
        stream.arguments('"')


class FunctionGemma(Gemma):
    """The notation of Gemma 4 with the markers of FunctionGemma."""

    call = ("<start_function_call>", "<end_function_call>")
    quote = "<escape>"
    special_tokens = (*call, quote)
