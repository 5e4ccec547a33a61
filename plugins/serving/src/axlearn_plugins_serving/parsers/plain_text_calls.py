"""Formats that write arguments as plain text in tags: Qwen 3 Coder, GLM, MiniMax M2 and DeepSeek V3.2.

The text of an argument ends at the next closing tag, so it cannot contain this tag.
"""

import json
import re
from types import MappingProxyType

from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Steps
from axlearn_plugins_serving.parsers.argument_types import argument_types, escape, to_json
from axlearn_plugins_serving.parsers.json_scanner import is_json
from axlearn_plugins_serving.parsers.marked_calls import MarkedCalls
from axlearn_plugins_serving.parsers.named_calls import BAR

_TAG_NAME = re.compile(r"[^<>\n]*")
_QUOTED_NAME = re.compile(r'[^"<>\n]*')
_LINE = re.compile(r"[^<\n]*")


class _Arguments:
    """Reads the arguments of a call and writes them as a JSON object.

    Args:
        stream: The output.
        name: Name of the function.
    """

    def __init__(self, stream: AnswerStream, name: str):
        self._stream = stream
        self._keys: set[str] = set()
        function = stream.functions.get(name)
        self._parameters = function.parameters if function else {}
        stream.start(name)

    def read(self, key: str, end: str, *, trim: bool = False, kind: str = "") -> Steps[None]:
        """Read the text of an argument, and the tag that ends it.

        Args:
            key: Name of the argument.
            end: The tag that ends it.
            trim: Whether a newline at each end of the text belongs to the tags.
            kind: `string` or `json` if the model wrote the type. Otherwise, the schema decides.
        """
        if not key or key in self._keys:
            raise Malformed
        if trim:
            yield from self._stream.accept("\n")
        types = frozenset({"string"}) if kind == "string" else argument_types(self._parameters, key)
        self._stream.arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        if types == {"string"} and kind != "json":
            yield from self._read_string(end, trim)
        else:
            parts: list[str] = []
            yield from self._stream.until(Markers(end), parts.append)
            yield from self._stream.expect(end)
            text = "".join(parts).removesuffix("\n") if trim else "".join(parts)
            raw = kind == "json" and is_json(text.strip())
            self._stream.arguments(text.strip() if raw else to_json(text, types))
        yield from self._stream.space()

    def _read_string(self, end: str, trim: bool) -> Steps[None]:
        """Read a string and write it as it arrives."""
        stream = self._stream
        markers = Markers("\n" + end, end) if trim else Markers(end)
        stream.arguments('"')
        marker = yield from stream.until(markers, lambda text: stream.arguments(escape(text)))
        stream.arguments('"' if marker else "")
        yield from stream.expect(*(["\n" + end] if trim else []), end)

    def close(self) -> None:
        """End the object."""
        self._stream.arguments("}" if self._keys else "{}")


class Qwen3Coder(MarkedCalls):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, as in Qwen 3 Coder, Qwen 3.5 and Nemotron 3."""

    sections = MappingProxyType({"<tool_call>": "</tool_call>"})
    call = ("<function=", "</function>")
    special_tokens = (*sections, *sections.values())
    end_required = True

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<tool_call>" in template and "<function=" in template and "<parameter=" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        name = yield from stream.read(_TAG_NAME)
        yield from stream.expect(">")
        arguments = yield from _start(stream, name.strip(), "<parameter=", self.call[1])
        while (yield from stream.accept("<parameter=")):
            key = yield from stream.read(_TAG_NAME)
            yield from stream.expect(">")
            yield from arguments.read(key.strip(), "</parameter>", trim=True)
        yield from _expect_next(stream, self.call[1])
        arguments.close()


class Glm(MarkedCalls):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, as in GLM 4.5 to 4.7."""

    call = ("<tool_call>", "</tool_call>")
    special_tokens = (*call, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    end_required = True

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<arg_key>" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        yield from stream.space()
        name = yield from stream.read(_LINE)
        arguments = yield from _start(stream, name.strip(), "<arg_key>", self.call[1])
        while (yield from stream.accept("<arg_key>")):
            key = yield from stream.read(_LINE)
            yield from stream.expect("</arg_key>")
            yield from stream.space()
            yield from stream.expect("<arg_value>")
            yield from arguments.read(key.strip(), "</arg_value>")
        yield from _expect_next(stream, self.call[1])
        arguments.close()


class MiniMaxM2(MarkedCalls):
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, as in MiniMax M2."""

    sections = MappingProxyType({"<minimax:tool_call>": "</minimax:tool_call>"})
    section_required = True
    call = ('<invoke name="', "</invoke>")
    special_tokens = (*sections, *sections.values())
    end_required = True

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return "<minimax:tool_call>" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        name = yield from stream.read(_QUOTED_NAME)
        yield from stream.expect('">')
        arguments = yield from _start(stream, name, '<parameter name="', self.call[1])
        while (yield from stream.accept('<parameter name="')):
            key = yield from stream.read(_QUOTED_NAME)
            yield from stream.expect('">')
            yield from arguments.read(key, "</parameter>")
        yield from _expect_next(stream, self.call[1])
        arguments.close()


class DeepSeekV32(MarkedCalls):
    """DSML, the tags of DeepSeek V3.2 and V4. A parameter says whether its value is a string or JSON."""

    sections = MappingProxyType(
        {f"<{BAR}DSML{BAR}{name}>": f"</{BAR}DSML{BAR}{name}>" for name in ("function_calls", "tool_calls")}
    )
    section_required = True
    call = (f'<{BAR}DSML{BAR}invoke name="', f"</{BAR}DSML{BAR}invoke>")
    special_tokens = (f"{BAR}DSML{BAR}",)
    end_required = True

    def matches(self, template: str) -> bool:
        """See `ToolFormat.matches`."""
        return f"{BAR}DSML{BAR}" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """See `MarkedCalls.read_call`."""
        name = yield from stream.read(_QUOTED_NAME)
        yield from stream.expect('">')
        arguments = yield from _start(stream, name, f'<{BAR}DSML{BAR}parameter name="', self.call[1])
        while (yield from stream.accept(f'<{BAR}DSML{BAR}parameter name="')):
            key = yield from stream.read(_QUOTED_NAME)
            tag = yield from stream.expect('" string="true">', '" string="false">')
            kind = "string" if "true" in tag else "json"
            yield from arguments.read(key, f"</{BAR}DSML{BAR}parameter>", kind=kind)
        yield from _expect_next(stream, self.call[1])
        arguments.close()


def _start(stream: AnswerStream, name: str, *tags: str) -> Steps[_Arguments]:
    """Write the name of a call if one of the tags follows. Return the reader of its arguments."""
    yield from stream.space()
    yield from _expect_next(stream, *tags)
    if not name:
        raise Malformed
    return _Arguments(stream, name)


def _expect_next(stream: AnswerStream, *texts: str) -> Steps[None]:
    """Raise `Malformed` if none of the texts comes next."""
    if not (yield from stream.starts_with(*texts)):
        raise Malformed
