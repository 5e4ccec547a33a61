"""Formats that write a call as one JSON object: Hermes, Llama 3, Mistral and Granite."""

import re
import uuid
from collections.abc import Sequence
from typing import ClassVar

from axlearn_plugins_serving.parsers.answer_formats import Function, Parser, ToolFormat
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Sink, Steps, StreamParser
from axlearn_plugins_serving.parsers.json_scanner import is_json
from axlearn_plugins_serving.parsers.marked_calls import MarkedCalls

_ARGUMENTS = ("arguments", "parameters")
_MISTRAL_NAME = re.compile(r"[^\s\[\]{}\"]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a character, which cannot be encoded
_MISTRAL_ID = re.compile(r"[0-9A-Za-z]*")


def read_named_call(stream: AnswerStream, name: str, id: str | None = None) -> Steps[None]:
    """Read a JSON object of arguments, and write a call. Raise `Malformed` if there is another value."""
    yield from stream.space()
    if not name or (yield from stream.peek()) != "{":
        raise Malformed
    stream.start(name, id)
    yield from stream.json(stream.arguments)


def read_call_object(stream: AnswerStream, *, strict: bool = False, own_ids: bool = False) -> Steps[None]:
    """Read an object with the members `name` and `arguments`, in any order, and write the call.

    Args:
        stream: The output.
        strict: Whether other members are errors, and the arguments are required. A format whose markers are optional uses this
            to tell calls from other JSON text.
        own_ids: Whether to choose ids that Mistral's templates accept.

    Raises:
        Malformed: If there is another value.
    """
    yield from _CallObject(stream, strict, own_ids).read()


class _CallObject:
    """State of `read_call_object`."""

    def __init__(self, stream: AnswerStream, strict: bool, own_ids: bool):
        self._stream, self._strict, self._own_ids = stream, strict, own_ids
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []  # arguments before the name

    def read(self) -> Steps[None]:
        stream = self._stream
        yield from stream.expect("{")
        while True:
            yield from stream.space()
            key = yield from stream.json_string()
            yield from stream.space()
            yield from stream.expect(":")
            yield from stream.space()
            yield from self._read_member(key)
            yield from stream.space()
            if (yield from stream.expect(",", "}")) == "}":
                break
        if self._name is None or (self._strict and not self._has_arguments):
            raise Malformed
        if self._early or not self._has_arguments:
            self._start()
            stream.arguments("".join(self._early) or "{}")

    def _read_member(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            self._name = yield from self._stream.json_string()
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            yield from self._read_arguments()
        elif key in (*_ARGUMENTS, "name") or (self._strict and key not in ("type", "id")):
            raise Malformed
        else:
            yield from self._stream.json(_ignore)

    def _read_arguments(self) -> Steps[None]:
        first = yield from self._stream.peek()
        if first == "{":
            yield from self._stream.json(self._start())
        elif first == '"':  # some models encode the arguments twice
            text = (yield from self._stream.json_string()).strip()
            if not text.startswith("{") or not is_json(text) or _SURROGATE.search(text):
                raise Malformed
            self._start()(text)
        else:
            yield from self._stream.expect("null")
            self._start()("{}")

    def _start(self) -> Sink:
        """Write the name if it is known. Return the function that receives the arguments."""
        if self._name is None:
            return self._early.append
        self._stream.start(self._name, new_mistral_id() if self._own_ids else None)
        return self._stream.arguments


def _ignore(text: str) -> None:
    del text


def _read_array(stream: AnswerStream, *, own_ids: bool = False) -> Steps[None]:
    """Read an array of calls. The first call has begun before the array."""
    yield from stream.expect("[")
    while True:
        yield from stream.space()
        yield from read_call_object(stream, own_ids=own_ids)
        stream.commit()
        yield from stream.space()
        if not (yield from stream.accept(",")):
            break
        yield from stream.space()
        if (yield from stream.peek()) != "{":
            raise Malformed
        stream.begin()
    yield from stream.accept("]")


class Hermes(MarkedCalls):
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`, as in Qwen 2.5, Qwen 3, Hermes and SmolLM3."""

    special_tokens = ("<tool_call>", "</tool_call>")
    call = ("<tool_call>", "</tool_call>")

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        other = ("<function=", "<arg_key>", "```json", "<|tool_call|>", "<invoke name=", "<tool_calls>")
        return "<tool_call>" in template and "arguments" in template and not any(text in template for text in other)

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        yield from stream.space()
        yield from read_call_object(stream)
        yield from stream.space()


class SequentialFormat(ToolFormat):
    """A format whose calls begin with `marker`."""

    marker: ClassVar[str]

    def call_start(self) -> str:
        """See `ToolFormat.call_start`."""
        return self.marker

    def new(self, functions: Sequence[Function], *, stream: bool) -> Parser:
        """See `ToolFormat.new`."""
        return StreamParser(self.read, functions, stream=stream)

    def read(self, stream: AnswerStream) -> Steps[None]:
        """Read the output."""
        markers = Markers(self.marker)
        while (yield from stream.until(markers, stream.text)):
            yield from self.read_attempt(stream)

    def read_attempt(self, stream: AnswerStream) -> Steps[None]:
        """Read calls. Text that is not a call is returned as text."""
        stream.begin()
        try:
            yield from self.read_calls(stream)
        except Malformed:
            stream.fail()
        stream.leave()

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """Read the marker and the calls that follow it."""
        raise NotImplementedError


class Llama3(SequentialFormat):
    """`{"name": NAME, "parameters": {...}}`, as in Llama 3.1 to 3.3.

    A call begins the output, or follows `<|python_tag|>`. Calls are separated by semicolons.
    """

    special_tokens = ("<|python_tag|>",)
    marker = "<|python_tag|>"

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        llama = "<|start_header_id|>" in template and "<TOOLCALL>" not in template
        return llama and '"parameters": ' in template

    def read(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read`."""
        leading = yield from stream.read(re.compile(r"\s*"))
        stream.text(leading)
        if (yield from stream.peek()) == "{":
            yield from self.read_attempt(stream)
        yield from super().read(stream)

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read_calls`."""
        yield from stream.accept(self.marker)
        while True:
            yield from stream.space()
            yield from read_call_object(stream, strict=True)
            stream.commit()
            if not (yield from stream.separator(";")):
                return
            yield from stream.space()
            if (yield from stream.peek()) != "{":
                return
            stream.begin()


class Mistral(SequentialFormat):
    """`[TOOL_CALLS][{"name": NAME, "arguments": {...}}]` and `[TOOL_CALLS]NAME[ARGS]{...}`.

    The templates accept only ids of nine letters and digits, so the format chooses the ids.
    """

    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    marker = "[TOOL_CALLS]"

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return self.marker in template

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read_calls`."""
        yield from stream.expect(self.marker)
        yield from stream.space()
        first = yield from stream.peek()
        if first == "[":
            yield from _read_array(stream, own_ids=True)
            return
        if first == "{":
            yield from read_call_object(stream, own_ids=True)
        else:
            yield from self._read_named(stream)
        stream.commit()

    def _read_named(self, stream: AnswerStream) -> Steps[None]:
        name = yield from stream.read(_MISTRAL_NAME)
        yield from stream.space()
        call_id = ""
        if (yield from stream.accept("[CALL_ID]")):
            call_id = yield from stream.read(_MISTRAL_ID)
            yield from stream.space()
        yield from stream.accept("[ARGS]")
        yield from read_named_call(stream, name, call_id if len(call_id) == 9 else new_mistral_id())


class Granite(SequentialFormat):
    """`<|tool_call|>[{"name": NAME, "arguments": {...}}]`, as in Granite 3."""

    special_tokens = ("<|tool_call|>",)
    marker = "<|tool_call|>"

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<|start_of_role|>" in template and self.marker in template

    def read_calls(self, stream: AnswerStream) -> Steps[None]:
        """See `SequentialFormat.read_calls`."""
        yield from stream.expect(self.marker)
        yield from stream.space()
        yield from _read_array(stream)


def new_mistral_id() -> str:
    """Return an id of nine letters and digits."""
    return uuid.uuid4().hex[:9]
