"""Harmony, the format of gpt-oss: messages with a channel and a recipient.

A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`. The prompt ends after `<|start|>assistant`,
so the first message begins with the rest of its header. The last message may end with `<|call|>`, with `<|return|>`, or with the
output.
"""

import re
from collections.abc import Sequence

import attrs

from axlearn_plugins_serving.parsers.answer_formats import Function, Parser, ReasoningFormat, ToolFormat
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Steps, StreamParser
from axlearn_plugins_serving.parsers.json_calls import read_named_call

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
_STOPS = Markers(*TOKENS)
_ENDS = (END, CALL, RETURN, CONSTRAIN)
_HEADER_END = Markers(MESSAGE, END, CALL, RETURN)
_FIELDS = re.compile(r"<\|channel\|>\s*(?P<channel>\w+)|to=(?P<recipient>[^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, " to=", "to=", "assistant")


@attrs.frozen
class _Header:
    """The header of a message.

    Attributes:
        text: The header as the model wrote it, up to and including `<|message|>`. Text that is not a header, because the model
            wrote no markers, is included too.
        complete: Whether the header ends with `<|message|>`.
        channel: Name of the channel, or an empty string.
        recipient: Name of the recipient, or an empty string.
    """

    text: str
    complete: bool = False
    channel: str = ""
    recipient: str = ""


def _read_header(stream: AnswerStream) -> Steps[_Header]:
    """Read the header of the next message. It is empty if the model writes text without one."""
    if not (yield from stream.starts_with(*_HEADER_STARTS)):
        return _Header("")
    parts: list[str] = []
    marker = yield from stream.until(_HEADER_END, parts.append)
    if marker == MESSAGE:
        parts.append((yield from stream.accept(MESSAGE)))
    text = "".join(parts)
    fields = {match.lastgroup: match[match.lastgroup] for match in _FIELDS.finditer(text) if match.lastgroup}
    return _Header(text, marker == MESSAGE, **fields)


class HarmonyReasoning(ReasoningFormat):
    """The analysis channel of gpt-oss. Messages of other channels stay text, with their markers."""

    special_tokens = TOKENS
    start = f"{CHANNEL}analysis{MESSAGE}"
    stop = END
    opening = CHANNEL
    closing = f"{CHANNEL}final{MESSAGE}"
    ending = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"

    def matches(self, template: str) -> bool:
        """See `ReasoningFormat.matches`."""
        return is_harmony(template)

    def is_inside(self, prompt: str) -> bool:
        """See `ReasoningFormat.is_inside`."""
        inside = prompt.rpartition(START)[2].partition(self.start)
        return bool(inside[1]) and END not in inside[2]

    def new(self, prompt: str) -> Parser:
        """See `ReasoningFormat.new`."""
        begun = self.is_inside(prompt)
        return StreamParser(lambda stream: self._read(stream, begun))

    def _read(self, stream: AnswerStream, begun: bool) -> Steps[None]:
        separator = ""
        while begun or (yield from stream.peek()):
            header = _Header("", channel="analysis") if begun else (yield from _read_header(stream))
            begun = False
            if header.channel == "analysis" and not header.recipient and (header.complete or not header.text):
                stream.reasoning(separator)
                yield from stream.until(_STOPS, stream.reasoning)
                yield from stream.accept(*_ENDS)
                separator = "\n"
            else:
                stream.text(header.text)
                yield from stream.until(_STOPS, stream.text)
                stream.text((yield from stream.accept(*_ENDS)))


class Harmony(ToolFormat):
    """Calls and answers of gpt-oss. The text has no markers, so the format is also needed without tools."""

    special_tokens = TOKENS
    frames_text = True

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return is_harmony(template)

    def new(self, functions: Sequence[Function], *, stream: bool) -> Parser:
        """See `ToolFormat.new`."""
        return StreamParser(_read_messages, functions, stream=stream)


def _read_messages(stream: AnswerStream) -> Steps[None]:
    while (yield from stream.peek()):
        header = yield from _read_header(stream)
        if not header.complete and not header.text.startswith((START, CHANNEL)):
            stream.text(header.text)
        elif header.recipient:
            stream.begin()
            try:
                yield from _read_call(stream, header.recipient.removeprefix("functions."))
            except Malformed:
                stream.fail()
            stream.leave()
        yield from stream.until(_STOPS, stream.text)
        yield from stream.accept(*_ENDS)


def _read_call(stream: AnswerStream, name: str) -> Steps[None]:
    """Read the text of a message as the arguments of a call."""
    yield from stream.space()
    if not (yield from stream.peek()) or (yield from stream.starts_with(*TOKENS)):
        stream.start(name)
        stream.arguments("{}")
    else:
        yield from read_named_call(stream, name)
        yield from stream.space()
        if (yield from stream.peek()) and not (yield from stream.starts_with(*TOKENS)):
            raise Malformed
    stream.commit()


def is_harmony(template: str) -> bool:
    """Return True if models with this chat template write messages with channels."""
    return all(token in template for token in (START, CHANNEL, MESSAGE))
