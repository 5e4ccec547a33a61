"""`MarkedCalls`: the base of formats that enclose each call in markers."""

from collections.abc import Sequence
from typing import ClassVar

from axlearn_plugins_serving.parsers.answer_formats import Function, Parser, ToolFormat
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Steps, StreamParser


class MarkedCalls(ToolFormat):
    """A format that encloses each call in markers, and may enclose consecutive calls in a section.

    Subclasses set the attributes and implement `read_call`.

    Attributes:
        section: Markers at the beginning and the end of consecutive calls, or None if there are none.
        section_required: Whether calls outside of a section are text.
        call: Markers at the beginning and the end of a call.
        end_required: Whether a call at the end of the output needs its last marker. If the format shows the end of the arguments in
            another way, the marker may be missing, because some models stop before it.
    """

    section: ClassVar[tuple[str, str] | None] = None
    section_required: ClassVar[bool] = False
    call: ClassVar[tuple[str, str]]
    end_required: ClassVar[bool] = False

    def new(self, functions: Sequence[Function], *, stream: bool) -> Parser:
        """See `ToolFormat.new`."""
        return StreamParser(self._read, functions, stream=stream)

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """Read a call without its markers. Call `start` and `arguments`.

        Raises:
            Malformed: If the text is not a call.
        """
        raise NotImplementedError

    def _read(self, stream: AnswerStream) -> Steps[None]:
        section = self.section[0] if self.section else ""
        markers = Markers(*filter(None, [section, "" if section and self.section_required else self.call[0]]))
        while marker := (yield from stream.until(markers, stream.text)):
            stream.begin()
            try:
                yield from self._read_calls(stream, marker == section)
            except Malformed:
                stream.fail()
            stream.leave()

    def _read_calls(self, stream: AnswerStream, in_section: bool) -> Steps[None]:
        if self.section and in_section:
            yield from stream.expect(self.section[0])
            yield from stream.space()
        while True:
            yield from stream.expect(self.call[0])
            yield from self.read_call(stream)
            if self.end_required:
                yield from stream.expect(self.call[1])
            else:
                yield from stream.expect_or_end(self.call[1])
            stream.commit()
            if not in_section or not self.section:
                return
            yield from stream.space()
            if (yield from stream.accept(self.section[1])):
                return
            if not (yield from stream.starts_with(self.call[0])):
                return
            stream.begin()
