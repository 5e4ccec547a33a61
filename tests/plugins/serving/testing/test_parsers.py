"""The suites for formats find parsers that write pieces in a wrong order. Other mistakes are mutants of the suites."""

import pytest

from axlearn_plugins_serving.parsers.answer_formats import CallArguments, CallStart, Reasoning, Text
from axlearn_plugins_serving.testing.parsers import Answer, Call, join, offer


def test_pieces_are_put_together():
    pieces = [
        Reasoning("a"),
        Reasoning("b"),
        Text("c"),
        Text("d"),
        CallStart(0, "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
    ]
    assert join(pieces) == Answer(("cd", ("f", "{}")), "ab")


@pytest.mark.parametrize(
    "pieces",
    [
        [CallStart(1, "f")],
        [CallStart(0, "f"), CallStart(0, "f")],
        [CallStart(0, "f"), CallArguments(1, "{}")],
        [CallStart(0, "f"), Text("a"), CallArguments(0, "{}")],
    ],
)
def test_pieces_in_a_wrong_order_fail(pieces):
    with pytest.raises(AssertionError):
        join(pieces)


def test_offered_functions_accept_the_calls():
    calls = [Call("f", {"a": "x", "b": None}), Call("f", {"c": True, "d": [1]}), Call("g", {})]
    functions = {function.name: function.parameters["properties"] for function in offer(calls)}
    types = {"a": "string", "b": "null", "c": "boolean", "d": "array"}
    assert functions == {"f": {key: {"type": kind} for key, kind in types.items()}, "g": {}}
