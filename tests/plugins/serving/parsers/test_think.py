"""Reasoning that is enclosed in markers."""

import pytest

from support.tool_call_writers import BAR, ReasoningTests, read


class TestThink(ReasoningTests):
    name, start, stop = "think", "<think>", "</think>"
    prompt = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    prompt_inside = "<|im_start|>assistant\n<think>\n"
    prompt_without = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TestMistralThink(ReasoningTests):
    name, start, stop = "mistral", "[THINK]", "[/THINK]"
    prompt = "[SYSTEM_PROMPT]Draft in [THINK]...[/THINK] first.[/SYSTEM_PROMPT][INST]Hi[/INST]"


class TestGraniteThought(ReasoningTests):
    name, start, stop = "granite", "Here is my thought process:", "Here is my response:"


class TestGemmaThought(ReasoningTests):
    name, start, stop = "gemma", "<|channel>thought", "<channel|>"
    prompt = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    prompt_inside = "<|turn>model\n<|channel>thought\n"
    prompt_without = "<|turn>model\n<|channel>thought\n<channel|>"


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>assistant\n<think>\nFirst",
        f"<{BAR}Assistant{BAR}><think>",
        "]~b]ai\n<think>\n",
        "<|assistant|>\n<think>",
    ],
)
def test_a_prompt_may_end_inside_of_the_reasoning(prompt):
    answer = read("so\n</think>\n\nyes", reasoning="think", prompt=prompt)
    assert (answer.reasoning, answer.text) == ("so", "yes")


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n",
        f"<{BAR}User{BAR}><think><{BAR}Assistant{BAR}>",
        "[INST]<think>[/INST]",
        "<|assistant|>\n<think></think>",
    ],
)
def test_a_marker_of_a_user_does_not_begin_reasoning(prompt):
    answer = read("yes </think>", reasoning="think", prompt=prompt)
    assert (answer.reasoning, answer.text) == ("", "yes </think>")


def test_a_marker_inside_of_the_answer_stays_text():
    answer = read("Use <think> tags.</think>", reasoning="think")
    assert (answer.reasoning, answer.text) == ("", "Use <think> tags.</think>")


def test_calls_of_kimi_end_the_reasoning():
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for output in (f"hm\n<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>", f"hm{call}"):
        answer = read(output, tools="kimi", reasoning="think", prompt="<think>")
        assert (answer.reasoning, answer.parts) == ("hm", (("f", "{}"),))


def test_empty_reasoning_is_dropped():
    answer = read("<think>\n\n</think>\n\nyes", reasoning="think")
    assert (answer.reasoning, answer.text) == ("", "yes")
