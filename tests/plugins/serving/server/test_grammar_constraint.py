"""Grammars that need too much work fail instead of delaying other requests, and errors name the cause."""

import json

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.parsers.answer_formats import Function
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.conversation import ToolUse
from axlearn_plugins_serving.server.early_checks import MAX_ENTRIES
from axlearn_plugins_serving.server.message_schemas import MAX_TOOL_COUNT
from axlearn_plugins_serving.server.structured_outputs import GrammarSource
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def grammars():
    return Grammars(ByteTokenizer.Config().build(), 257)


def generate(constraint, text):
    """Generate a text, and return whether it is complete."""
    complete = False
    for token in text.encode():
        assert constraint.mask()[token // 32] >> (token % 32) & 1
        complete = constraint.accept(token)
    return complete


def test_an_ambiguous_grammar_fails_early(grammars):
    constraint = grammars.build(GrammarSource("grammar", 'start: a\na: a a | "x" | a a a | ""', "grammar"))
    with pytest.raises(
        RequestError, match=r"simplify its grammar or schema: .*Current row has .* max is 200"
    ) as caught:
        generate(constraint, "x" * 400)
    assert "<state>" not in str(caught.value)


def test_a_token_that_the_mask_forbids_is_no_fault_of_the_grammar(grammars):
    constraint = grammars.build(GrammarSource("grammar", 'start: "x" "y"', "grammar"))
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        constraint.accept(ord("y"))


def test_a_grammar_that_fails_with_the_first_token_is_refused(grammars):
    source = GrammarSource("grammar", "start: " + " | ".join(f'"x" "{i}"' for i in range(250)), "grammar")
    with pytest.raises(ApiError, match=r"it needs too much work for one token; simplify .* max is 200") as caught:
        grammars.build(source)
    assert (caught.value.status, caught.value.param) == (400, "grammar")


@pytest.mark.parametrize("forced", [False, True])
def test_a_schema_may_have_hundreds_of_optional_properties(forced, grammars):
    schema = {"properties": {f"f{i}": {"type": "string"} for i in range(300)}, "additionalProperties": False}
    if forced:
        constraint = grammars.force_calls(ToolUse(functions=(Function("f", schema),), mode="required"))
        text = '[{"name":"f","arguments":{"f3": "a", "f250": "b"}}]'
    else:
        constraint, text = grammars.new({"type": "object", **schema}), '{"f3": "a", "f250": "b"}'
    assert generate(grammars.rebuild(constraint.grammar), text)


@pytest.mark.parametrize("text", ['{"grammars": [{"lark_grammar": "start: /a/"}]}', '{\nstart: "a"', "{}"])
def test_a_grammar_that_begins_like_json_is_refused(text, grammars):
    with pytest.raises(ApiError, match="grammar: the grammar cannot be used"):
        grammars.build(GrammarSource("grammar", text, "grammar"))


def test_a_schema_in_a_grammar_has_the_limits_of_grammars(grammars):
    schema = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(300)}}
    with pytest.raises(ApiError, match="max is 200"):
        grammars.build(GrammarSource("grammar", f"start: %json {json.dumps(schema)}", "grammar"))


def test_as_many_choices_as_a_request_may_have(grammars):
    choices = [f"word {i}" for i in range(MAX_ENTRIES - 2)] + ['"quoted" | a\\', "é\n"]
    constraint = grammars.build(GrammarSource("choice", json.dumps(choices), "structured_outputs.choice"))
    for choice in ("word 977", *choices[-2:]):
        assert generate(constraint.copy(), choice)
    with pytest.raises(AssertionError):
        generate(constraint.copy(), "word x")


@pytest.mark.parametrize("name", ["tool_{}", "{}_tool", 'a"\\{}', "{}é"])
def test_as_many_required_tools_as_a_request_may_have(name, grammars):
    functions = [
        Function(name.format(i), {"properties": {"x": {"const": i}}, "required": ["x"]}) for i in range(MAX_TOOL_COUNT)
    ]
    constraint = grammars.force_calls(ToolUse(functions=tuple(functions), mode="required"))

    def write(*indices):
        calls = [{"name": functions[i].name, "arguments": {"x": x}} for i, x in indices]
        return json.dumps(calls, ensure_ascii=False, separators=(",", ":"))

    assert generate(constraint.copy(), write((1, 1), (11, 11), (MAX_TOOL_COUNT - 1, MAX_TOOL_COUNT - 1)))
    with pytest.raises(AssertionError):
        generate(constraint.copy(), write((1, 11)))


def test_large_schemas_stay_within_the_limits(grammars):
    properties = {
        f"field{i}": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"enum": [1, 2, i]}}]} for i in range(60)
    }
    text = "{" + ", ".join(f'"field{i}": [1, 2, {i}]' for i in range(60)) + "}"
    constraint = grammars.new({"type": "object", "properties": properties, "required": list(properties)})
    assert generate(constraint, text)


@pytest.mark.parametrize("named", [False, True])
def test_an_error_names_the_tool_whose_parameters_cannot_be_met(grammars, named):
    short = {"type": "string", "minLength": 5, "maxLength": 2}
    path = "tools[0].function.parameters"
    functions = (Function("bad", {"properties": {"a": short}, "required": ["a"]}, path), Function("good"))
    with pytest.raises(ApiError) as caught:
        grammars.force_calls(ToolUse(functions=functions, mode="required", named=named, parallel=True))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, path, "invalid_function_parameters")
    begin = f"{path}: the parameters of the tool 'bad' cannot be used: Unsatisfiable schema: "
    assert caught.value.message.startswith(begin)
    assert "call_0" not in caught.value.message
