"""Formats that write the name of a function before its arguments as JSON: DeepSeek V3 and V3.1, and Kimi K2."""

import re
from types import MappingProxyType

from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Steps
from axlearn_plugins_serving.parsers.json_calls import read_named_call
from axlearn_plugins_serving.parsers.marked_calls import MarkedCalls

BAR = "\uff5c"
"""The fullwidth vertical line in DeepSeek's special tokens."""
_SEPARATOR = f"<{BAR}tool▁sep{BAR}>"
_NAME = re.compile(r"[^<\n]*")


class _DeepSeek(MarkedCalls):
    """The markers that DeepSeek V3 and V3.1 have in common."""

    sections = MappingProxyType({f"<{BAR}tool▁calls▁begin{BAR}>": f"<{BAR}tool▁calls▁end{BAR}>"})
    call = (f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>")
    special_tokens = (*sections, *sections.values(), *call, _SEPARATOR)

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return self.call[0] in template


class DeepSeekV3(_DeepSeek):
    """`function SEP NAME` and the arguments in a block of code, as in DeepSeek V3 and R1."""

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return super().matches(template) and "```json" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        yield from stream.space()
        yield from stream.expect("function")
        yield from stream.expect(_SEPARATOR)
        name = yield from stream.read(_NAME)
        yield from stream.space()
        yield from stream.expect("```json")
        yield from read_named_call(stream, name.strip())
        yield from stream.space()
        yield from stream.expect_or_end("```")
        yield from stream.space()


class DeepSeekV31(_DeepSeek):
    """`NAME SEP` and the arguments, as in DeepSeek V3.1."""

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return super().matches(template) and "```json" not in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        name = yield from stream.read(_NAME)
        yield from stream.expect(_SEPARATOR)
        yield from read_named_call(stream, name.strip())
        yield from stream.space()


class Kimi(MarkedCalls):
    """`functions.NAME:NUMBER` and the arguments, as in Kimi K2. The id of the call is kept.

    Attributes:
        starts: The markers that begin calls.
    """

    sections = MappingProxyType({"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"})
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    starts = (*sections, call[0])
    special_tokens = (*sections, *sections.values(), *call, "<|tool_call_argument_begin|>")

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<|tool_calls_section_begin|>" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        call_id = (yield from stream.read(_NAME)).strip()
        yield from stream.space()
        yield from stream.expect("<|tool_call_argument_begin|>")
        yield from read_named_call(stream, call_id.removeprefix("functions.").rpartition(":")[0], call_id)
        yield from stream.space()
