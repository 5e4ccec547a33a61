"""Messages of gpt-oss with channels and recipients."""

import pytest

from support import tool_call_writers as writers
from support.tool_call_writers import FormatTests, ReasoningTests, read

FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


class TestHarmony(FormatTests):
    name, writer = "harmony", writers.harmony
    keeps_text = False

    def write_text(self, text):
        return f"<|start|>assistant{FINAL}{text}<|end|>" if text else ""


class TestHarmonyReasoning(ReasoningTests):
    name = "harmony"
    prompt = "<|start|>user<|message|>What is <|channel|>analysis?<|end|><|start|>assistant"
    prompt_inside = "<|end|><|start|>assistant<|channel|>analysis<|message|>"

    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else '<|channel|>analysis<|message|>'}{reasoning}<|end|>{self.write_text(text)}"

    def write_text(self, text):
        return f"<|start|>assistant{FINAL}{text}<|end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_calls_and_answers(stream):
    output = (
        f"<|channel|>analysis<|message|>First{NEXT}<|channel|>analysis<|message|>second{NEXT}"
        f"<|channel|>commentary<|message|>Let me look.{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"
    )
    answer = read(output, tools="harmony", reasoning="harmony", stream=stream)
    assert (answer.reasoning, answer.parts) == ("First\nsecond", ("Let me look.", ("f", "{}")))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (f"{FINAL}Hello<|return|>", "Hello"),
        (f"{FINAL}Hello", "Hello"),
        ("Hello", "Hello"),
        ("assistant is a word", "assistant is a word"),
        (f"{FINAL}a{FINAL}b<|constrain|>c<|message|>d", "abcd"),
        ("<|channel|>commentary to=functions.x<|message|>{}<|call|>", "{}"),
        ("<|channel|>commentary to=functions.f<|message|>{oops<|call|>", "{oops"),
        ("<|channel|>commentary to=functions.f<|message|>oops<|call|>", "oops"),
        ("<|channel|>final", ""),
        ("<|start|><|end|>", ""),
    ],
)
def test_no_marker_is_shown(output, text):
    answer = read(output, tools="harmony", reasoning="harmony")
    assert (answer.text, answer.calls) == (text, [])


def test_a_call_may_have_no_arguments():
    output = "<|channel|>commentary to=functions.f<|message|><|call|>"
    assert read(output, tools="harmony").parts == (("f", "{}"),)


def test_reasoning_is_text_if_reasoning_is_off():
    output = f"<|channel|>analysis<|message|>think{NEXT}{FINAL}Hello"
    assert read(output, tools="harmony").parts == ("thinkHello",)
