"""`MarkedCalls`: the base of formats that enclose each call in markers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from axlearn_plugins_serving.parsers.answer_formats import Function, Parser, ToolFormat
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, Steps, StreamParser


class MarkedCalls(ToolFormat):
    """A format that encloses each call in markers, and may enclose consecutive calls in a section.

    Subclasses set the attributes and implement `read_call`.

    Attributes:
        sections: Markers at the end of consecutive calls, by the markers at their beginning.
        section_required: Whether calls outside of a section are text.
        call: Markers at the beginning and the end of a call.
        end_required: Whether a call at the end of the output needs its last marker. If the format shows the end of the arguments in
            another way, the marker may be missing, because some models stop before it.
    """

    sections: ClassVar[Mapping[str, str]] = MappingProxyType({})
    section_required: ClassVar[bool] = False
    call: ClassVar[tuple[str, str]]
    end_required: ClassVar[bool] = False

    def call_start(self) -> str:
        """See `ToolFormat.call_start`."""
        return next(iter(self.sections), self.call[0])

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
        starts = [*self.sections, *(() if self.section_required else (self.call[0],))]
        markers = Markers(*starts)
        while marker := (yield from stream.until(markers, stream.text)):
            stream.begin()
            try:
                if marker in self.sections:
                    yield from self._read_section(stream, marker)
                else:
                    yield from self._read_call(stream)
            except Malformed:
                stream.fail()
            stream.leave()

    def _read_section(self, stream: AnswerStream, marker: str) -> Steps[None]:
        yield from stream.expect(marker)
        yield from stream.space()
        while True:
            yield from self._read_call(stream)
            yield from stream.space()
            if not (yield from stream.starts_with(self.call[0])):
                break
            stream.begin()
        yield from stream.accept(self.sections[marker])

    def _read_call(self, stream: AnswerStream) -> Steps[None]:
        yield from stream.expect(self.call[0])
        yield from self.read_call(stream)
        if self.end_required:
            yield from stream.expect(self.call[1])
        else:
            yield from stream.expect_or_end(self.call[1])
        stream.commit()
