"""Choice of formats by name and by chat template."""

import pytest

from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_serving.parsers import selection
from axlearn_plugins_serving.parsers.answer_formats import ReasoningFormat, ToolFormat
from axlearn_plugins_serving.parsers.selection import choose_reasoning_format, choose_tool_format
from support.tool_call_writers import BAR

TEMPLATES = {
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}': ("hermes", None),
    "{{ '<tool_call>\\n{\"name\": ' }} arguments {% if '</think>' in content %}": ("hermes", "think"),
    "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + name }} </think>": (
        "qwen3-coder",
        "think",
    ),
    "<|start_header_id|> {{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}": ("llama3", None),
    "{{ '<|header_start|>assistant<|header_end|>' }}": ("llama4", None),
    "{{ '[TOOL_CALLS][' }}": ("mistral", None),
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}{{ '[THINK]' + block + '[/THINK]' }}": ("mistral", "mistral"),
    f"<{BAR}tool▁call▁begin{BAR}>{{{{ '\\n```json\\n' }}}} </think>": ("deepseek-v3", "think"),
    f"<{BAR}tool▁call▁begin{BAR}>{{{{ name }}}}<{BAR}tool▁sep{BAR}> </think>": ("deepseek-v3.1", "think"),
    f"{{%- set dsml_token = '{BAR}DSML{BAR}' -%}} </think>": ("deepseek-v3.2", "think"),
    "<|start|>assistant<|channel|>final<|message|>": ("harmony", "harmony"),
    "{{ '\\n<tool_call>' + name }}<arg_key>{{ k }}</arg_key> </think>": ("glm", "think"),
    "<|tool_calls_section_begin|><|tool_call_begin|>": ("kimi", None),
    "{{ '<|tool_call>call:' }}<|\"|> {{ '<|channel>thought\\n<channel|>' }}": ("gemma", "gemma"),
    "<start_function_call>call:{{ name }}<escape>": ("function-gemma", None),
    "{%- set begin = '<minimax:tool_call>' -%}<invoke name= </think>": ("minimax-m2", "think"),
    "<|start_of_role|>assistant respond with <|tool_call|> Here is my thought process Here is my response": (
        "granite",
        "granite",
    ),
    "<|tool_call_start|>[{{ name }}(": ("lfm2", None),
    "{% for message in messages %}{{ message.content }}{% endfor %}": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_exactly_one_format_matches_a_template(template):
    for choice, group, name in zip(
        (choose_tool_format, choose_reasoning_format), selection.GROUPS, TEMPLATES[template], strict=True
    ):
        chosen = choice(template)
        assert type(chosen) is (registry().entry(group, name).load() if name else type(None))


def test_every_format_has_a_template_here():
    for group, column in zip(selection.GROUPS, (0, 1), strict=True):
        names = {names[column] for names in TEMPLATES.values()} - {None}
        assert names == {
            entry.name for entry in registry().entries(group) if entry.distribution == "axlearn-plugins-serving"
        }


def test_formats_are_chosen_by_name():
    assert type(choose_tool_format("[TOOL_CALLS]", "glm")).__name__ == "Glm"
    assert choose_tool_format("[TOOL_CALLS]", "none") is None
    assert choose_reasoning_format("</think>", "none") is None
    assert choose_tool_format(None) is None


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(RequestError, match="hermes"):
        choose_tool_format(None, "hermse")


def test_several_matches_are_an_error():
    with pytest.raises(RequestError, match=r"glm, mistral[\s\S]*--tool-parser glm"):
        choose_tool_format("<arg_key> [TOOL_CALLS]")
    with pytest.raises(RequestError, match=r"mistral, think[\s\S]*--reasoning-parser mistral"):
        choose_reasoning_format("[/THINK] </think>")


def test_an_entry_point_must_be_a_format(monkeypatch):
    entry = registry().entry("tool_parsers", "glm")
    monkeypatch.setattr(type(entry), "load", lambda self: ReasoningFormat)
    with pytest.raises(PluginError, match=f"not a {ToolFormat.__name__} class"):
        choose_tool_format(None, "glm")
