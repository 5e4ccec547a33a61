"""Conversion of plain text by the types in a schema."""

import pytest

from axlearn_plugins_serving.parsers.argument_types import argument_types, to_json

CITY = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (CITY, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": ["a", 1, None, 1.5, True]}, {"string", "integer", "null", "number", "boolean"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [CITY, {"type": "integer"}]}, {"string", "integer"}),
        ({"anyOf": [CITY, {}]}, set()),
        ({"allOf": [{"description": "a city"}, CITY]}, {"string"}),
        ({"$ref": "#/$defs/city"}, {"string"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "https://example.com/city"}, set()),
        ({"$ref": 5}, set()),
        ({}, set()),
        (True, set()),
        ({"type": 5}, set()),
    ],
)
def test_types_of_a_schema(schema, types):
    parameters = {"properties": {"a": schema}, "$defs": {"city": CITY, "loop": {"$ref": "#/$defs/loop"}}}
    assert argument_types(parameters, "a") == types


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": []}, {"properties": {"b": CITY}}])
def test_an_argument_without_a_schema_has_any_type(parameters):
    assert argument_types(parameters, "a") == frozenset()


@pytest.mark.parametrize(
    ("text", "types", "json"),
    [
        ("5", {"string"}, '"5"'),
        (" 5\n", {"integer"}, "5"),
        ("5", {"integer", "string"}, "5"),
        ("5.5", {"integer", "string"}, '"5.5"'),
        ("5.5", {"number", "string"}, "5.5"),
        ("5", {"number", "string"}, "5"),
        ("TRUE", {"boolean"}, "true"),
        ("True", set(), '"True"'),
        ("none", {"null", "string"}, "null"),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ('{"a": 1}', {"array"}, '{"a": 1}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("", {"integer"}, '""'),
        ("é\n", set(), '"é\\n"'),
    ],
)
def test_text_becomes_json(text, types, json):
    assert to_json(text, frozenset(types)) == json
