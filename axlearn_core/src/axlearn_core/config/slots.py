"""Check that each component implements the protocol that annotates its slot."""

import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from axlearn_core.config.node import Node, get_fields, is_node, resolve_hints
from axlearn_core.errors import Problem


def check_slots(value: Node[Any]) -> Iterator[Problem]:
    """Yield a problem for each direct child whose class lacks a method of its slot's protocol.

    Only methods of classes are checked. Attributes exist only on instances, and the result of a factory function is
    unknown until it is called.
    """
    below = get_fields(value)
    for name, annotation in resolve_hints(type(value)).items():
        protocol = _protocol(annotation)
        if protocol is None:
            continue
        methods = list_methods(protocol)
        for path, part in _nodes(below.get(name), name):
            owner = type(part).owner or _find_built_type(type(part))
            if not inspect.isclass(owner) or type(part).__configured__:
                continue
            if missing := [method for method in methods if not _has(part, owner, method)]:
                yield Problem(
                    path=path,
                    message=f"{owner.__qualname__} does not implement {protocol.__name__}",
                    got=f"{owner.__module__}:{owner.__qualname__}, without {', '.join(missing)}",
                    expected=f"a component with {', '.join(methods)}",
                    fix=f"use a component that implements {protocol.__name__}; `axlearn plugins list` shows what is installed",
                )


@functools.lru_cache(maxsize=4096)
def list_slots(cls: type, protocol: type) -> tuple[str, ...]:
    """Return the names of fields annotated `Node[protocol]`, including optional ones."""
    return tuple(name for name, annotation in resolve_hints(cls).items() if _protocol(annotation) is protocol)


def _has(part: Node[Any], owner: object, method: str) -> bool:
    """Return True if a component has a method, or if it wraps a component that has it."""
    if callable(getattr(owner, method, None)):
        return True
    below = (child for name, value in get_fields(part).items() for _, child in _nodes(value, name))
    return any(_has(child, type(child).owner or _find_built_type(type(child)), method) for child in below)


@functools.lru_cache(maxsize=1024)
def _find_built_type(cls: type) -> Any:
    """Return the annotated return type of `build`, or None. It stands in for a missing owner."""
    try:
        return typing.get_type_hints(cls.build).get("return")  # type: ignore[attr-defined]
    except (NameError, TypeError, AttributeError):
        return None


def list_methods(protocol: type) -> list[str]:
    """Return the names of a protocol's public methods."""
    names: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if _is_protocol(base):
            members = vars(base).items()
            names |= {n: None for n, m in members if inspect.isfunction(m) and (n == "__call__" or n[0] != "_")}
    return list(names)


def _is_protocol(kind: object) -> bool:
    return inspect.isclass(kind) and typing.Protocol in kind.__bases__


def _protocol(annotation: object) -> type | None:
    """Return the protocol P of the first `Node[P]` in an annotation, or None."""
    arguments = typing.get_args(annotation)
    if is_node(typing.get_origin(annotation)):
        kind = arguments[0] if arguments else None
        return kind if _is_protocol(kind) else None
    return next((protocol for a in arguments if (protocol := _protocol(a)) is not None), None)


def _nodes(value: object, path: str) -> Iterator[tuple[str, Node[Any]]]:
    """Yield the nodes in a slot, whose value is a node, a tuple, or a mapping."""
    if isinstance(value, Node):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _nodes(item, f"{path}.{i}")
    elif isinstance(value, typing.Mapping):
        for name, item in value.items():
            yield from _nodes(item, f"{path}.{name}")
