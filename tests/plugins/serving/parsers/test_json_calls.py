"""Calls that are one JSON object: Hermes, Llama 3, Mistral and Granite."""

import json
import re

import pytest

from axlearn_plugins_serving.parsers.answer_formats import CallStart, Function
from axlearn_plugins_serving.parsers.selection import choose_tool_format
from support import tool_call_writers as writers
from support.tool_call_writers import FormatTests, read


class TestHermes(FormatTests):
    name, writer = "hermes", writers.hermes


class TestLlama3(FormatTests):
    name, writer = "llama3", writers.llama3
    text_before = False


class TestMistralArrays(FormatTests):
    name, writer = "mistral", writers.mistral


class TestMistralNames(FormatTests):
    name, writer = "mistral", writers.mistral_named


class TestGranite(FormatTests):
    name, writer = "granite", writers.granite


def test_a_call_between_texts():
    output = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n\nDone.\n'
    for stream in (False, True):
        assert read(output, tools="hermes", stream=stream).parts == ("Sure.\n", ("f", '{"a": 1}'), "\n\nDone.\n")


def test_blank_text_next_to_calls_is_dropped():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for stream in (False, True):
        answer = read(f"\n\n{call}\n\n{call}\n", tools="hermes", stream=stream)
        assert answer.parts == (("f", "{}"), ("f", "{}"))
    assert read(" \n", tools="hermes").parts == (" \n",)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("null", "{}"),
        ('{"a": "\\ud83d\\ude00"}', '{"a": "\\ud83d\\ude00"}'),
    ],
    ids=["object", "encoded twice", "null", "surrogate pair"],
)
def test_spellings_of_arguments(arguments, parsed):
    output = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(output, tools="hermes").parts == (("f", parsed),)


@pytest.mark.parametrize(
    "members",
    [
        '"name": "f", "arguments": [1]',
        '"name": "f", "arguments": "text"',
        '"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"',
        '"name": 5, "arguments": {}',
        '"arguments": {}',
        '"name": "f", "name": "g", "arguments": {}',
        '"name": "f", "arguments": {"a": NaN}',
        '"name": "f", "arguments": {"a": 1,}',
        "",
    ],
)
def test_malformed_objects_stay_text(members):
    output = f"a<tool_call>{{{members}}}</tool_call>b"
    assert read(output, tools="hermes").parts == (output,)


def test_text_after_an_error_follows_a_streamed_call():
    output = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> <tool_call>{"name": "g"}</tool_call>'
    assert read(output, tools="hermes").parts == (output[: output.index(" <")] + " ", ("g", "{}"))
    assert read(output, tools="hermes", stream=True).parts == (("f", '{"a": '), "oops}}</tool_call> ", ("g", "{}"))


def test_a_call_without_its_end_is_a_call_at_the_end():
    output = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    for stream in (False, True):
        assert read(output, tools="hermes", stream=stream).parts == (("f", '{"a": 1}'),)
    assert read(output + "\nand", tools="hermes").parts == (output + "\nand",)
    assert read(output[:-2], tools="hermes").parts == (output[:-2],)


def test_arguments_before_the_name_are_kept():
    output = '<tool_call>{"arguments": {"a": [1, {}]}, "id": [{}], "name": "f"}</tool_call>'
    assert read(output, tools="hermes", stream=True).parts == (("f", '{"a": [1, {}]}'),)


def test_a_call_that_is_too_long_stays_text():
    output = f'<tool_call>{{"name": "f", "arguments": {{"a": "{"x" * 5_000_000}"}}}}</tool_call>'
    for size in (1000, len(output)):
        answer = read(output, tools="hermes", size=size)
        assert answer.text == output
        assert not answer.calls


def test_llama_calls_follow_text_only_after_the_tag():
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert read(f"\n {call}", tools="llama3").parts == (("f", '{"a": 1}'),)
    assert read(f"See {call}", tools="llama3").parts == (f"See {call}",)
    assert read(f"See <|python_tag|>{call}; {call}", tools="llama3").parts == (
        "See ",
        ("f", '{"a": 1}'),
        ("f", '{"a": 1}'),
    )


@pytest.mark.parametrize(
    "text", ['{"name": "Ada", "age": 36}', '{"name": "f"}', '{"f": {}}', "{}", "{", '{"name": "f", "parameters": {}']
)
def test_other_json_of_llama_stays_text(text):
    for stream in (False, True):
        if '"parameters"' not in text or not stream:
            assert read(text, tools="llama3", stream=stream).parts == (text,)


def test_mistral_calls_have_ids_that_the_template_accepts():
    outputs = [
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "1"}]',
        "[TOOL_CALLS]f[CALL_ID]12[ARGS]{}",
        "[TOOL_CALLS]f[ARGS]{}",
    ]
    for output in outputs:
        parser = choose_tool_format(None, "mistral").new([Function("f")], stream=True)
        (start,) = [piece for piece in parser.push(output) + parser.end() if isinstance(piece, CallStart)]
        assert re.fullmatch("[0-9A-Za-z]{9}", start.id)
    parser = choose_tool_format(None, "mistral").new([Function("f")], stream=True)
    assert CallStart(0, "f", "abc12DEF9") in parser.push("[TOOL_CALLS]f[CALL_ID]abc12DEF9[ARGS]{}")


def test_a_function_that_was_not_offered_does_not_end_an_array():
    members = [{"name": name, "arguments": {"a": name}} for name in ("f", "x", "g")]
    answer = read(f"[TOOL_CALLS]{json.dumps(members)}", tools="mistral")
    assert [name for name, _ in answer.calls] == ["f", "g"]
    assert json.dumps(members[1]) in answer.text
