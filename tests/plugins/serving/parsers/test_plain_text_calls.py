"""Calls with plain text in tags: Qwen 3 Coder, GLM, MiniMax M2 and DeepSeek V3.2."""

import json

import pytest

from axlearn_plugins_serving.parsers.answer_formats import Function
from support import tool_call_writers as writers
from support.tool_call_writers import BAR, FormatTests, read


class TestQwen3Coder(FormatTests):
    name, writer = "qwen3-coder", writers.qwen3_coder
    forbidden = ("</parameter>",)


class TestGlm(FormatTests):
    name, writer = "glm", writers.glm
    forbidden = ("</arg_value>",)


class TestMiniMaxM2(FormatTests):
    name, writer = "minimax-m2", writers.minimax_m2
    forbidden = ("</parameter>",)


class TestDeepSeekV32(FormatTests):
    name, writer = "deepseek-v3.2", writers.deepseek_v32
    forbidden = (f"</{BAR}DSML{BAR}parameter>",)


CONVERSIONS = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "\n  indented\n", "\n  indented\n"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "None", None),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "[5]", "[5]"),
    ({"type": "array"}, '["a", 1]', ["a", 1]),
    ({}, '{"a": null}', {"a": None}),
    ({}, "New York", "New York"),
]


@pytest.mark.parametrize(("schema", "text", "value"), CONVERSIONS)
def test_the_schema_decides_the_type_of_a_value(schema, text, value):
    function = Function("f", {"type": "object", "properties": {"a": schema}})
    outputs = {
        "qwen3-coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax-m2": f'<minimax:tool_call><invoke name="f"><parameter name="a">{text}</parameter></invoke></minimax:tool_call>',
    }
    for name, output in outputs.items():
        for stream in (False, True):
            ((_, arguments),) = read(output, tools=name, functions=[function], stream=stream).calls
            assert json.loads(arguments) == {"a": value}


def test_deepseek_writes_the_types_of_values():
    def call(kind, text):
        tag = f"{BAR}DSML{BAR}"
        return (
            f'<{tag}function_calls><{tag}invoke name="f"><{tag}parameter name="a" string="{kind}">{text}</{tag}parameter>'
            f"</{tag}invoke></{tag}function_calls>"
        )

    for kind, text, value in [("true", "5", "5"), ("false", "5", 5), ("false", "[1", "[1")]:
        ((_, arguments),) = read(call(kind, text), tools="deepseek-v3.2").calls
        assert json.loads(arguments) == {"a": value}
    assert not read(call("perhaps", "5"), tools="deepseek-v3.2").calls


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<parameter=>\n1\n</parameter>\n</function>",
        "<parameter=a>\n1\n</parameter>",
        "<parameter=a>\n1\n</function>",
        "text</function>",
    ],
    ids=["repeated", "unnamed", "no end of the call", "no end of the value", "no tag"],
)
def test_malformed_tags_stay_text(body):
    output = f"<tool_call>\n<function=f>\n{body}\n</tool_call>"
    assert read(output, tools="qwen3-coder").parts == (output,)


def test_qwen_may_leave_out_the_outer_tag():
    output = "Sure.\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    assert read(output, tools="qwen3-coder").parts == ("Sure.\n", ("f", '{"a": 1}'))


def test_minimax_calls_outside_of_a_section_stay_text():
    output = '<invoke name="f"></invoke>'
    assert read(output, tools="minimax-m2").parts == (output,)
