"""Check values against type annotations, strictly: `True` is not an int, 2.9 is not an int, "false" is not a bool.

Values are converted only to a canonical immutable form. Lists become tuples, mappings become `immutabledict`, and an int
in a float field becomes a float, so configs with `1` and `1.0` are equal.
"""

import collections.abc
import enum
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from immutabledict import immutabledict


class Mismatch(Exception):
    """A value does not match its annotation. `path` is the path inside the value."""

    def __init__(self, expected: str, got: object, path: tuple[str, ...] = ()):
        super().__init__(expected)
        self.expected, self.got, self.path = expected, got, path


def describe(annotation: object) -> str:
    """Format an annotation for error messages: `int`, `tuple[str, ...]`, `Node[Norm] or null`."""
    if annotation is None or annotation is types.NoneType:
        return "null"
    if annotation is Any:
        return "anything"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin is typing.Annotated:
        return describe(args[0])
    kind = origin or annotation
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    if args:
        return f"{name}[{', '.join('...' if a is ... else describe(a) for a in args)}]"
    return name


def show(value: object) -> str:
    """Format a value and its type for an error message."""
    text, newline, _ = repr(value).partition("\n")
    if newline or len(text) > 80:
        text = text[:77] + "..."
    return f"{text} ({type(value).__name__})"


def check_type(value: object, annotation: object, is_node: Callable[[Any], bool]) -> Any:
    """Return `value` in canonical form. Raise `Mismatch` if it has the wrong type."""
    if annotation is Any:
        return freeze(value)
    if annotation is None or annotation is types.NoneType:
        if value is None:
            return None
        raise Mismatch("null", value)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return check_type(value, args[0], is_node)
    if origin in (typing.Union, types.UnionType):
        return _check_union(value, annotation, args, is_node)
    if origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        raise Mismatch(describe(annotation), value)
    if origin is tuple or annotation is tuple:
        return _check_tuple(value, annotation, args, is_node)
    if origin in (collections.abc.Mapping, dict, immutabledict) or annotation in (Mapping, dict, immutabledict):
        return _check_mapping(value, annotation, args or (str, Any), is_node)
    return _check_plain(value, annotation, origin or annotation, is_node)


def accepts_all(annotation: object, kind: type, is_node: Callable[[Any], bool]) -> bool:
    """Return True if `check_type` returns every value of class `kind` unchanged.

    It returns False for classes other than nodes, None, int and bool, because it does not examine them.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return accepts_all(args[0], kind, is_node)
    if origin in (typing.Union, types.UnionType):
        return any(accepts_all(a, kind, is_node) for a in args)
    if kind in (bool, int):
        return annotation is kind
    if kind is types.NoneType:
        return annotation in (None, types.NoneType)
    plain = origin or annotation
    return is_node(kind) and is_node(plain) and isinstance(plain, type) and issubclass(kind, plain)


def _check_plain(value: object, annotation: object, kind: object, is_node: Callable[[Any], bool]) -> Any:
    if kind is float:
        if type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if type(value) is float and not math.isnan(value):
            return value
    elif kind in (int, str, bool):
        if type(value) is kind:
            return value
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if isinstance(value, kind):
            return value
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
        raise Mismatch(f"one of {', '.join(kind.__members__)}", value)
    elif kind in (collections.abc.Callable, type):
        if callable(value):
            return value
    elif isinstance(kind, typing.TypeVar):
        return freeze(value)
    elif isinstance(kind, type):
        # Node[Protocol] accepts any node. A Config class accepts only its instances.
        if is_node(kind) and is_node(type(value)) and isinstance(value, kind):
            return value
        if not is_node(kind) and isinstance(value, kind):
            return value
    raise Mismatch(describe(annotation), value)


def _check_union(value: object, annotation: object, args: tuple[Any, ...], is_node: Callable[[Any], bool]) -> Any:
    # Try exact members first, so that `int | float` keeps an int.
    deepest: Mismatch | None = None
    for arg in sorted(args, key=lambda a: a is float and type(value) is int):
        try:
            return check_type(value, arg, is_node)
        except Mismatch as error:
            if error.path and (deepest is None or len(error.path) > len(deepest.path)):
                deepest = error
    raise deepest or Mismatch(describe(annotation), value)


def _check_tuple(value: object, annotation: object, args: tuple[Any, ...], is_node: Callable[[Any], bool]) -> Any:
    if not isinstance(value, (tuple, list)):
        raise Mismatch(describe(annotation), value)
    if not args:
        return freeze(tuple(value))
    kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is ... else list(args)
    if kinds == [()]:
        kinds = []
    if len(kinds) != len(value):
        raise Mismatch(f"{describe(annotation)} ({len(kinds)} items)", value)
    return tuple(_check_item(str(i), v, k, is_node) for i, (v, k) in enumerate(zip(value, kinds, strict=True)))


def _check_mapping(value: object, annotation: object, args: tuple[Any, ...], is_node: Callable[[Any], bool]) -> Any:
    if not isinstance(value, Mapping):
        raise Mismatch(describe(annotation), value)
    key_type, value_type = args
    return immutabledict(
        {check_type(k, key_type, is_node): _check_item(str(k), v, value_type, is_node) for k, v in value.items()}
    )


def _check_item(name: str, value: object, annotation: object, is_node: Callable[[Any], bool]) -> Any:
    try:
        return check_type(value, annotation, is_node)
    except Mismatch as error:
        raise Mismatch(error.expected, error.got, (name, *error.path)) from None


def freeze(value: object) -> Any:
    """Convert plain data to an immutable, hashable form."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return immutabledict({k: freeze(v) for k, v in value.items()})
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(v) for v in value)
    return value
