"""Reasoning formats that enclose the reasoning in markers: `<think>`, Mistral, Granite and Gemma 4."""

import re
from typing import ClassVar

from axlearn_plugins_serving.parsers.answer_formats import Parser, ReasoningFormat
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Markers, Steps, StreamParser
from axlearn_plugins_serving.parsers.named_calls import Kimi

_SPACE = re.compile(r"\s*")
_EVERYTHING = re.compile(r".*", re.DOTALL)
_NEWLINES = re.compile(r"[\r\n]*")
_TURN = re.compile(r"<[|\uff5c]|[|\uff5c]>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|\]~|\[e~\[")
"""Markers of turns. Text after one of them does not continue the reasoning before it."""


class MarkedReasoning(ReasoningFormat):
    """A format that encloses the reasoning in `start` and `stop`.

    The reasoning begins the output, unless the prompt ends inside of it. Whitespace around the reasoning and newlines before the
    answer are dropped.

    Attributes:
        interrupts: Text that ends the reasoning and belongs to the answer, because some models leave out `stop` before it.
    """

    interrupts: ClassVar[tuple[str, ...]] = ()

    def new(self, prompt: str) -> Parser:
        """See `ReasoningFormat.new`."""
        begun = self.is_inside(prompt)
        return StreamParser(lambda stream: self._read(stream, begun))

    def is_inside(self, prompt: str) -> bool:
        """See `ReasoningFormat.is_inside`."""
        _, start, after = prompt.rpartition(self.start.rstrip())
        return bool(start) and self.stop not in after and not _TURN.search(after)

    def _read(self, stream: AnswerStream, begun: bool) -> Steps[None]:
        leading = yield from stream.read(_SPACE)
        if (yield from stream.accept(self.start)) or begun:
            yield from _read_trimmed(stream, Markers(self.stop, *self.interrupts))
            yield from stream.accept(self.stop)
            yield from stream.match(_NEWLINES)
        else:
            stream.text(leading)
        yield from stream.match(_EVERYTHING, stream.text)


def _read_trimmed(stream: AnswerStream, stops: Markers) -> Steps[None]:
    """Read reasoning up to a marker, and write it without whitespace at its ends."""
    spaces: list[str] = []
    begun = False

    def write(text: str) -> None:
        nonlocal begun
        if not begun:
            text = text.lstrip()
        if not text:
            return
        begun = True
        if body := text.rstrip():
            stream.reasoning("".join([*spaces, body]))
            spaces.clear()
        if len(body) < len(text):
            spaces.append(text[len(body) :])

    yield from stream.until(stops, write)


class Think(MarkedReasoning):
    """`<think>...</think>`, as in DeepSeek R1, Qwen 3, GLM, Kimi K2, MiniMax M2, SmolLM3 and Nemotron."""

    special_tokens = ("<think>", "</think>")
    start = "<think>"
    stop = "</think>"
    interrupts = Kimi.starts  # Kimi K2 calls tools while it reasons

    def matches(self, template: str) -> bool:
        """See `ReasoningFormat.matches`."""
        return self.stop in template


class MistralThink(MarkedReasoning):
    """`[THINK]...[/THINK]`, as in Magistral."""

    special_tokens = ("[THINK]", "[/THINK]")
    start = "[THINK]"
    stop = "[/THINK]"

    def matches(self, template: str) -> bool:
        """See `ReasoningFormat.matches`."""
        return self.stop in template


class GraniteThought(MarkedReasoning):
    """`Here is my thought process: ... Here is my response: ...`, as in Granite 3.2."""

    start = "Here is my thought process:"
    stop = "Here is my response:"

    def matches(self, template: str) -> bool:
        """See `ReasoningFormat.matches`."""
        return self.start.rstrip(":") in template and self.stop.rstrip(":") in template


class GemmaThought(MarkedReasoning):
    """`<|channel>thought ... <channel|>`, as in Gemma 4."""

    special_tokens = ("<|channel>", "<channel|>")
    start = "<|channel>thought\n"
    stop = "<channel|>"

    def matches(self, template: str) -> bool:
        """See `ReasoningFormat.matches`."""
        return "<|channel>" in template and self.stop in template
