"""Calls in Python's syntax, and in the notation of Gemma 4."""

import json

import pytest

from support import tool_call_writers as writers
from support.tool_call_writers import FormatTests, read


class TestLlama4(FormatTests):
    name, writer = "llama4", writers.llama4
    text_before = False


class TestLfm2(FormatTests):
    name, writer = "lfm2", writers.lfm2


class TestGemma(FormatTests):
    name, writer = "gemma", writers.gemma
    forbidden = ('<|"|>',)


class TestFunctionGemma(FormatTests):
    name, writer = "function-gemma", writers.function_gemma
    forbidden = ("<escape>",)


LITERALS = [
    (r"'it\'s'", "it's"),
    (r'"\x41\u00e9\U0001F600\101\n\t\\"', "Aé😀A\n\t\\"),
    (r"'C:\dir'", r"C:\dir"),
    ("'''a\n\"b\" 'c' '''", "a\n\"b\" 'c' "),
    ("''", ""),
    ('""""""', ""),
    ("(1, 2,)", [1, 2]),
    ("[]", []),
    ("{'a': {'b': [True, None]}, }", {"a": {"b": [True, None]}}),
    ("0x10", 16),
    ("1_000", 1000),
    (".5", 0.5),
    ("+3", 3),
    ("true", True),
    ("12345678901234567890123", 12345678901234567890123),
]


@pytest.mark.parametrize(("literal", "value"), LITERALS)
def test_python_literals_become_json(literal, value):
    for stream in (False, True):
        ((name, arguments),) = read(f"[f(a = {literal})]", tools="llama4", stream=stream).calls
        assert (name, json.loads(arguments)) == ("f", {"a": value})


@pytest.mark.parametrize(
    "literal",
    [
        "x",
        "f()",
        "1 + 2",
        "1j",
        "{1}",
        "{1: 2}",
        "1_0e999",
        "b'x'",
        r"'\xZZ'",
        r"'\U00110000'",
        "'open",
        "[1",
        "-" * 500,
        "9" * 5000,
    ],
)
def test_other_expressions_stay_text(literal):
    output = f"[f(a={literal})]"
    assert read(output, tools="llama4").parts == (output,)


@pytest.mark.parametrize("text", ["[1] says", "[f]", "[f(1)]", "[f(a=1, a=2)]", "[g(", "[", "see [f(a=1)]"])
def test_other_lists_stay_text(text):
    for stream in (False, True) if "a=2" not in text else (False,):
        assert read(text, tools="llama4", stream=stream).parts == (text,)


def test_half_of_a_surrogate_pair_stays_an_escape():
    ((_, arguments),) = read(r"[f(a='\ud83d')]", tools="llama4").calls
    assert arguments == r'{"a": "\ud83d"}'


def test_llama4_may_write_an_object():
    output = '<|python_start|>{"name": "f", "parameters": {"a": 1}}<|python_end|>'
    assert read(output, tools="llama4").parts == (("f", '{"a": 1}'),)


def test_values_of_gemma_become_json():
    output = '<|tool_call>call:f{a:<|"|>5<|"|>,b:5,c:None,d:plain text,e:{<|"|>x y<|"|>:[1.5,true]},g:{}}<tool_call|>'
    ((_, arguments),) = read(output, tools="gemma").calls
    assert json.loads(arguments) == {"a": "5", "b": 5, "c": None, "d": "plain text", "e": {"x y": [1.5, True]}, "g": {}}


@pytest.mark.parametrize(
    "body", ["call:f{a:}", "call:f{a}", "call:f{a:1", "call:f", "f{}", 'call:f{a:<|"|>x}', "call:f{a:1 b:2}"]
)
def test_malformed_calls_of_gemma_stay_text(body):
    output = f"<|tool_call>{body}<tool_call|>"
    assert read(output, tools="gemma").parts == (output,)
