"""Writers of tool calls: each returns calls in the syntax of a family, as its chat template renders them."""

import json
from collections.abc import Callable

import pytest

from axlearn_plugins_serving.parsers.answer_formats import Function
from axlearn_plugins_serving.parsers.chain import Chain
from axlearn_plugins_serving.parsers.selection import choose_reasoning_format, choose_tool_format
from axlearn_plugins_serving.testing import ReasoningFormatSuite, ToolFormatSuite
from axlearn_plugins_serving.testing.parsers import constant_sizes, parse

BAR = "\uff5c"


class FormatTests(ToolFormatSuite):
    """The suite for the format `name`, with outputs of `writer`."""

    name: str
    writer: Callable

    @pytest.fixture(autouse=True, params=[40, pytest.param(1000, marks=pytest.mark.slow)])
    def _format(self, request):
        self.cases = request.param
        self.format = choose_tool_format(None, self.name)

    def write(self, calls, rng):
        return type(self).writer(calls, rng)


class ReasoningTests(ReasoningFormatSuite):
    """The suite for the reasoning format `name`, with these markers."""

    name: str
    start: str
    stop: str

    @pytest.fixture(autouse=True)
    def _format(self):
        self.format = choose_reasoning_format(None, self.name)

    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else self.start}\n{reasoning}\n{self.stop}\n\n{text}"


def read(output, *, tools=None, reasoning=None, functions=("f", "g"), stream=False, prompt="", size=1):
    """Parse an output with the named formats. Functions are names, or `Function` objects."""
    offered = [name if isinstance(name, Function) else Function(name) for name in functions]
    parsers = [choose_reasoning_format(None, reasoning).new(prompt)] if reasoning else []
    parsers += [choose_tool_format(None, tools).new(offered, stream=stream)] if tools else []
    return parse(Chain(parsers), output, constant_sizes(size))


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(calls, rng):
    ascii_only, space = rng.random() < 0.3, rng.choice(("\n", "", " \n "))
    written = []
    for call in calls:
        members = [f'"name": {dump(call.name)}', f'"arguments": {json.dumps(call.arguments, ensure_ascii=ascii_only)}']
        if (
            rng.random() < 0.3 and len(members[1]) < 500
        ):  # arguments before the name cannot be returned while they are written
            members.reverse()
        written.append(f"<tool_call>{space}{{{', '.join(members)}}}{space}</tool_call>")
    return rng.choice(("\n", "", "\n\n")).join(written)


def qwen3_coder(calls, rng):
    def value(argument):
        return dump(argument) if isinstance(argument, dict | list) else str(argument)

    written = []
    for call in calls:
        parameters = "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in call.arguments.items())
        written.append(f"<function={call.name}>\n{parameters}</function>")
    if rng.random() < 0.2:
        return "\n".join(written)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


def llama3(calls, rng):
    tag, kind = rng.choice(("", "<|python_tag|>")), rng.choice(("", '"type": "function", '))
    return tag + rng.choice((";", "; ", " ;\n")).join(
        f'{{{kind}"name": {dump(call.name)}, "parameters": {dump(call.arguments)}}}' for call in calls
    )


def llama4(calls, rng):
    written = [f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls]
    start, end = rng.choice((("", ""), ("<|python_start|>", "<|python_end|>")))
    return f"{start}[{', '.join(written)}]{end}"


def lfm2(calls, rng):
    return f"<|tool_call_start|>{llama4(calls, rng).replace('<|python_start|>', '').replace('<|python_end|>', '')}<|tool_call_end|>"


def mistral(calls, rng):
    del rng
    members = ({"name": call.name, "arguments": call.arguments, "id": "abcdefghi"} for call in calls)
    return f"[TOOL_CALLS][{', '.join(dump(member) for member in members)}]"


def mistral_named(calls, rng):
    ids = rng.random() < 0.5
    return "".join(
        f"[TOOL_CALLS]{call.name}{'[CALL_ID]abcdefghi' if ids else ''}[ARGS]{dump(call.arguments)}" for call in calls
    )


def granite(calls, rng):
    del rng
    return f"<|tool_call|>{dump([{'name': call.name, 'arguments': call.arguments} for call in calls])}"


def deepseek_v3(calls, rng):
    written = [
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>{call.name}\n```json\n{dump(call.arguments)}\n```"
        f"<{BAR}tool▁call▁end{BAR}>"
        for call in calls
    ]
    return f"<{BAR}tool▁calls▁begin{BAR}>{rng.choice((chr(10), '')).join(written)}<{BAR}tool▁calls▁end{BAR}>"


def deepseek_v31(calls, rng):
    del rng
    written = [
        f"<{BAR}tool▁call▁begin{BAR}>{call.name}<{BAR}tool▁sep{BAR}>{dump(call.arguments)}<{BAR}tool▁call▁end{BAR}>"
        for call in calls
    ]
    return f"<{BAR}tool▁calls▁begin{BAR}>{''.join(written)}<{BAR}tool▁calls▁end{BAR}>"


def deepseek_v32(calls, rng):
    d, block = f"{BAR}DSML{BAR}", rng.choice(("function_calls", "tool_calls"))
    text = f"<{d}{block}>\n"
    for call in calls:
        text += f'<{d}invoke name="{call.name}">\n'
        for key, value in call.arguments.items():
            kind, written = ("true", value) if isinstance(value, str) else ("false", dump(value))
            text += f'<{d}parameter name="{key}" string="{kind}">{written}</{d}parameter>\n'
        text += f"</{d}invoke>\n"
    return text + f"</{d}{block}>"


def kimi(calls, rng):
    del rng
    written = [
        f"<|tool_call_begin|>functions.{call.name}:{i}<|tool_call_argument_begin|>{dump(call.arguments)}<|tool_call_end|>"
        for i, call in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def glm(calls, rng):
    line = rng.choice(("\n", ""))
    written = []
    for call in calls:
        values = ((k, v if isinstance(v, str) else dump(v)) for k, v in call.arguments.items())
        pairs = (f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in values)
        written.append(f"<tool_call>{call.name}{line}{''.join(pairs)}</tool_call>")
    return line.join(written)


def minimax_m2(calls, rng):
    del rng
    text = "<minimax:tool_call>\n"
    for call in calls:
        values = ((k, v if isinstance(v, str) else dump(v)) for k, v in call.arguments.items())
        pairs = (f'<parameter name="{k}">{v}</parameter>' for k, v in values)
        text += f'<invoke name="{call.name}">\n{"".join(pairs)}</invoke>\n'
    return text + "</minimax:tool_call>"


def _gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(item, quote)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_gemma_value(item, quote) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def gemma(calls, rng):
    del rng
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{call.name}{_gemma_value(call.arguments, quote)}<tool_call|>" for call in calls)


def function_gemma(calls, rng):
    del rng
    return "".join(
        f"<start_function_call>call:{call.name}{_gemma_value(call.arguments, '<escape>')}<end_function_call>"
        for call in calls
    )


def harmony(calls, rng):
    written = []
    for call in calls:
        header = rng.choice(
            (
                f" to=functions.{call.name}<|channel|>commentary json<|message|>",
                f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>",
                f"<|channel|>commentary to=functions.{call.name}<|message|>",
            )
        )
        written.append(f"<|start|>assistant{header}{dump(call.arguments)}<|call|>")
    return "".join(written)
