"""Grammars that need too much work fail instead of delaying other requests, and errors name the cause."""

import pytest

from axlearn_plugins_serving.parsers.answer_formats import Function
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.constraints import Grammars
from axlearn_plugins_serving.server.conversation import ToolUse
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
    constraint = grammars.parse_lark('start: a\na: a a | "x" | a a a | ""', "grammar")
    with pytest.raises(ValueError, match="Complex"):
        generate(constraint, "x" * 400)


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
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, path, "invalid_json_schema")
    begin = f"{path}: the parameters of the tool 'bad' cannot be used: Unsatisfiable schema: "
    assert caught.value.message.startswith(begin)
    assert "call_0" not in caught.value.message
