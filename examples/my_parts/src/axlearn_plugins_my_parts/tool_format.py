"""The `call-tags` tool parser."""

import re

from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Steps
from axlearn_plugins_serving.parsers.json_calls import read_named_call
from axlearn_plugins_serving.parsers.marked_calls import MarkedCalls


class CallTags(MarkedCalls):
    """`<call NAME>{...}</call>`."""

    call = ("<call ", "</call>")

    def matches(self, template: str) -> bool:
        """Return True if models with this chat template write such tags."""
        return "</call>" in template

    def read_call(self, stream: AnswerStream) -> Steps[None]:
        """Read a name and a JSON object."""
        name = yield from stream.read(re.compile(r"[\w-]*"))
        yield from stream.expect(">")
        yield from read_named_call(stream, name)
