"""Conversion of arguments that a model writes as plain text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_plugins_serving.parsers.json_scanner import is_json

_MAX_REFERENCES = 20
"""Nesting of references and unions in a schema that is followed."""
_PYTHON = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "none": ("null", "null"),
    "null": ("null", "null"),
}
_INTEGER = re.compile(r"-?[0-9]+")


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a function accepts for an argument.

    Args:
        parameters: JSON schema of the arguments.
        name: Name of the argument.

    Returns:
        Names of types, such as `string`. The set is empty if the schema allows any type, or does not name the argument.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _schema_types(schema, parameters, _MAX_REFERENCES)


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if reference := schema.get("$ref"):
        return _schema_types(_resolve(reference, root), root, depth - 1)
    types = schema.get("type")
    if types is not None:
        names = [types] if isinstance(types, str) else _list(types)
        nullable = ["null"] if schema.get("nullable") is True else []
        return frozenset(str(name).lower() for name in [*names, *nullable])
    if "const" in schema or "enum" in schema:
        return frozenset(_value_type(value) for value in _list(schema.get("enum")) or [schema.get("const")])
    for union in ("anyOf", "oneOf", "allOf"):
        options = [_schema_types(option, root, depth - 1) for option in _list(schema.get(union))]
        if options:
            return frozenset().union(*options) if all(options) or union == "allOf" else frozenset()
    return frozenset()


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema that `#/$defs/name` refers to, or None if there is none."""
    part: Any = root if str(reference).startswith("#/") else None
    for key in str(reference).removeprefix("#/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _value_type(value: Any) -> str:
    kinds = [
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (Mapping, "object"),
        (list, "array"),
    ]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def to_json(text: str, types: frozenset[str]) -> str:
    """Convert an argument to JSON.

    Strings stay strings, even if they look like numbers. Other arguments are JSON or Python words such as `True`. An argument of
    another form becomes a string.

    Args:
        text: The argument as the model wrote it.
        types: Types that the function accepts, or an empty set if they are unknown.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    value = text.strip()
    kind, word = _PYTHON.get(value.lower(), ("", ""))
    if kind in types:
        return word
    if is_json(value) and ("string" not in types or _json_type(value) & types):
        return value
    return json.dumps(text, ensure_ascii=False)


def _json_type(value: str) -> frozenset[str]:
    """Return the types of a JSON value."""
    first = value[0]
    simple = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    if first in simple:
        return frozenset({simple[first]})
    return frozenset({"integer", "number"} if _INTEGER.fullmatch(value) else {"number"})


def escape(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
