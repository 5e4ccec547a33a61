"""The primitives of parsers: markers, calls and pieces."""

import re

import pytest

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Function, Reasoning, Text
from axlearn_plugins_serving.parsers.answer_stream import AnswerStream, Malformed, Markers, StreamParser


def test_markers_hold_back_text_that_may_begin_one():
    markers = Markers("<a>", "<ab>", "<a>c")
    assert markers.search("x<a", 0, final=False) == (1, "")
    assert markers.search("x<a", 0, final=True) == (3, "")
    assert markers.search("x<a>", 0, final=False) == (1, "")
    assert markers.search("x<a>", 0, final=True) == (1, "<a>")
    assert markers.search("x<a>d", 0, final=False) == (1, "<a>")
    assert markers.search("x<a>c", 0, final=False) == (1, "<a>c")
    assert markers.search("<<ab>", 1, final=False) == (1, "<ab>")
    assert markers.search("<<<x", 0, final=False) == (4, "")


def read_words(stream):
    """Write words that end with a dot as calls, and others as text. A word in capitals is reasoning."""
    while (yield from stream.peek()):
        word = yield from stream.read(re.compile(r"[a-z]*"))
        stream.begin()
        try:
            stream.start(word)
            stream.arguments("{")
            stream.arguments("}")
            yield from stream.expect(".")
            stream.commit()
        except Malformed:
            stream.fail()
        stream.leave()
        yield from stream.match(re.compile("[A-Z]*"), stream.reasoning)
        yield from stream.match(re.compile("[ ,]*"), stream.text)


@pytest.mark.parametrize("size", [1, 100])
def test_pieces_of_one_kind_are_joined(size):
    parser = StreamParser(read_words, [Function("ab"), Function("cd")], stream=False)
    pieces = [piece for i in range(0, 11, size) for piece in parser.push("ab.XY cd.  "[i : i + size])] + parser.end()
    if size == 100:
        arguments = [CallArguments(0, "{}"), CallArguments(1, "{}")]
        assert pieces == [CallStart(0, "ab"), arguments[0], Reasoning("XY"), CallStart(1, "cd"), arguments[1]]
    assert not [piece for piece in pieces if isinstance(piece, Text)]


def test_a_streamed_call_that_fails_keeps_its_index():
    parser = StreamParser(read_words, [Function("ab"), Function("cd")])
    pieces = parser.push("ab,cd.") + parser.end()
    assert [piece.index for piece in pieces if isinstance(piece, CallStart)] == [0, 1]


def test_calls_need_a_beginning():
    with pytest.raises(RuntimeError, match="no call has begun"):
        AnswerStream().arguments("{}")
