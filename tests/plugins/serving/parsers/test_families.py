"""Each family's tool calls are parsed exactly, in pieces of any size, and malformed ones raise nothing."""

import pytest

from axlearn_plugins_serving.parsers.selection import choose_reasoning_format, choose_tool_format
from axlearn_plugins_serving.testing import ReasoningFormatSuite, ToolFormatSuite
from support import tool_call_writers as writers

DSML = f"</{writers.BAR}DSML{writers.BAR}parameter>"
FAMILIES = {
    "deepseek-v3": ("deepseek-v3", writers.deepseek_v3, {}),
    "deepseek-v3.1": ("deepseek-v3.1", writers.deepseek_v31, {}),
    "deepseek-v3.2": ("deepseek-v3.2", writers.deepseek_v32, {"forbidden": [DSML]}),
    "function-gemma": ("function-gemma", writers.function_gemma, {"forbidden": ["<escape>"]}),
    "gemma": ("gemma", writers.gemma, {"forbidden": ['<|"|>']}),
    "glm": ("glm", writers.glm, {"forbidden": ["</arg_value>"]}),
    "granite": ("granite", writers.granite, {}),
    "harmony": ("harmony", writers.harmony, {"keeps_text": False}),
    "hermes": ("hermes", writers.hermes, {}),
    "kimi": ("kimi", writers.kimi, {}),
    "lfm2": ("lfm2", writers.lfm2, {}),
    "llama3": ("llama3", writers.llama3, {"text_before": False}),
    "llama4": ("llama4", writers.llama4, {"text_before": False}),
    "minimax-m2": ("minimax-m2", writers.minimax_m2, {"forbidden": ["</parameter>"]}),
    "mistral": ("mistral", writers.mistral, {}),
    "mistral-named": ("mistral", writers.mistral_named, {}),
    "qwen3-coder": ("qwen3-coder", writers.qwen3_coder, {"forbidden": ["</parameter>"]}),
}


class _Families(ToolFormatSuite):
    @pytest.fixture(autouse=True, params=FAMILIES)
    def family(self, request):
        name, self._write, options = FAMILIES[request.param]
        self.format = choose_tool_format(None, name)
        for option, value in options.items():
            setattr(self, option, value)

    def write(self, calls, rng):
        return self._write(calls, rng)

    def write_text(self, text):
        return text if self.keeps_text or not text else f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


class TestFamilies(_Families):
    pass


@pytest.mark.slow
class TestFamiliesThoroughly(_Families):
    cases = 1000


class _Reasoning(ReasoningFormatSuite):
    name, start, stop = "think", "<think>", "</think>"

    @pytest.fixture(autouse=True)
    def _format(self):
        self.format = choose_reasoning_format(None, self.name)

    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else self.start}\n{reasoning}\n{self.stop}\n\n{text}"


class TestThink(_Reasoning):
    prompt = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    prompt_inside = "<|im_start|>assistant\n<think>\n"
    prompt_without = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TestMistralThink(_Reasoning):
    name, start, stop = "mistral", "[THINK]", "[/THINK]"
    prompt = "[SYSTEM_PROMPT]Draft in [THINK]...[/THINK] first.[/SYSTEM_PROMPT][INST]Hi[/INST]"


class TestGraniteThought(_Reasoning):
    name, start, stop = "granite", "Here is my thought process:", "Here is my response:"


class TestGemmaThought(_Reasoning):
    name, start, stop = "gemma", "<|channel>thought", "<channel|>"
    prompt = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    prompt_inside = "<|turn>model\n<|channel>thought\n"
    prompt_without = "<|turn>model\n<|channel>thought\n<channel|>"


class TestHarmonyAnalysis(_Reasoning):
    name = "harmony"
    prompt = "<|start|>user<|message|>What is <|channel|>analysis?<|end|><|start|>assistant"
    prompt_inside = "<|end|><|start|>assistant<|channel|>analysis<|message|>"

    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else self.format.start}{reasoning}<|end|>{self.write_text(text)}"

    def write_text(self, text):
        return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"
