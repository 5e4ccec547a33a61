"""Calls with the name before the arguments: DeepSeek V3 and V3.1, and Kimi K2."""

from axlearn_plugins_serving.parsers.answer_formats import CallStart, Function
from axlearn_plugins_serving.parsers.selection import choose_tool_format
from support import tool_call_writers as writers
from support.tool_call_writers import BAR, FormatTests, read


class TestDeepSeekV3(FormatTests):
    name, writer = "deepseek-v3", writers.deepseek_v3


class TestDeepSeekV31(FormatTests):
    name, writer = "deepseek-v3.1", writers.deepseek_v31


class TestKimi(FormatTests):
    name, writer = "kimi", writers.kimi


def test_ids_of_kimi_are_kept():
    parser = choose_tool_format(None, "kimi").new([Function("f")], stream=True)
    output = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    assert CallStart(0, "f", "functions.f:3") in parser.push(output)


def test_calls_without_a_section_are_calls():
    output = "Hm <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(output, tools="kimi").parts == ("Hm ", ("f", "{}"))


def test_a_malformed_call_in_a_section_stays_text():
    name = f"f<{BAR}tool▁sep{BAR}>"
    call = f"<{BAR}tool▁call▁begin{BAR}>{name}{{}}<{BAR}tool▁call▁end{BAR}>"
    section = f"<{BAR}tool▁calls▁begin{BAR}>{call}{call.replace('{}', '{1}')}<{BAR}tool▁calls▁end{BAR}>"
    answer = read(section, tools="deepseek-v3.1")
    assert answer.calls == [("f", "{}")]
    assert answer.text == section.replace(call, "").removeprefix(f"<{BAR}tool▁calls▁begin{BAR}>")
