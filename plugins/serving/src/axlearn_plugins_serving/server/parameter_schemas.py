"""Check the JSON schemas of tools' parameters.

A schema is checked even if the model is free to call the tool or not, because templates show it to the model and parsers read the
types of arguments from it. The check takes time that is linear in the size of the schema. Whether a schema can be satisfied is
only known once its grammar is built, which happens if a call is required.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is an object of schemas."""
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_NUMBERS = frozenset({"maximum", "minimum", "multipleOf"})
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})


def check_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments if it is valid.

    A keyword that is null counts as absent.

    Raises:
        PydanticCustomError: The schema is not a JSON schema of an object. The message has the path of the first wrong keyword.
    """
    types = schema.get("type")
    if isinstance(types, str) and types in _TYPES and types != "object":
        _fail("type", f"is '{types}', but arguments are an object; set it to 'object'")
    if isinstance(types, list) and "object" not in types:
        _fail("type", "does not include 'object', but arguments are an object")
    for path, keyword, value in _keywords(schema, ""):
        if value is not None:
            _check_keyword(f"{path}{keyword}", keyword, value, schema)
    return schema


def _keywords(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each keyword of a schema and of the schemas inside it, with the path of its schema and its value."""
    for keyword, value in schema.items():
        yield path, keyword, value
        inner: list[tuple[str, Any]] = []
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            inner = [(f"{path}{keyword}.{name}", each) for name, each in value.items()]
        elif (keyword in _SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
            inner = [(f"{path}{keyword}[{i}]", each) for i, each in enumerate(value)]
        elif keyword in _SCHEMAS or keyword == "items":
            inner = [(f"{path}{keyword}", value)]
        for location, each in inner:
            if isinstance(each, dict):
                yield from _keywords(each, f"{location}.")
            elif not isinstance(each, bool) and each is not None:
                _fail(location, "should be a JSON schema: an object, true or false")


def _check_keyword(path: str, keyword: str, value: Any, root: Mapping[str, Any]) -> None:
    """Raise an error if the value of a keyword has the wrong form."""
    if keyword == "type":
        _check_types(path, value)
    elif keyword in _SCHEMAS_BY_NAME and not isinstance(value, dict):
        _fail(path, "should be an object of JSON schemas")
    elif keyword in _SCHEMA_LISTS and not (isinstance(value, list) and value):
        _fail(path, "should be a list of JSON schemas")
    elif keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        _fail(path, "should be a list of names of properties")
    elif keyword == "enum" and not isinstance(value, list):
        _fail(path, "should be a list of values")
    elif keyword in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        _fail(path, "should be a number")
    elif keyword in _COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        _fail(path, "should be an integer that is not negative")
    elif keyword in ("pattern", "$ref"):
        if not isinstance(value, str):
            _fail(path, "should be a string")
        elif keyword == "$ref" and value.startswith("#/") and not _has(root, value):
            _fail(path, f"is '{value[:80]}', which the schema does not contain")


def _check_types(path: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in _TYPES:
            hint = f"did you mean '{name.lower()}'?" if isinstance(name, str) and name.lower() in _TYPES else ""
            _fail(path, f"is {_spell(name)}, which is not a type; {hint or 'use ' + ', '.join(_TYPES)}")
    if not names:
        _fail(path, "should have at least one type")


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value[:80]}'"
    return {dict: "an object", list: "a list"}.get(type(value), str(value))


def _has(root: Any, pointer: str) -> bool:
    """Return whether a schema contains the value at a JSON pointer, such as `#/$defs/City`."""
    for part in pointer[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, dict) and name in root:
            root = root[name]
        else:
            return False
    return True


def _fail(path: str, reason: str) -> None:
    raise PydanticCustomError("invalid_function_parameters", "{path} {reason}", {"path": path[:200], "reason": reason})
