"""Check that each component implements the protocol that annotates its slot."""

import functools
import inspect
import math
import typing
from collections.abc import Iterator
from typing import Any

from axlearn_core.config.node import Node, get_fields, is_node, resolve_hints
from axlearn_core.errors import Problem


def check_slots(value: Node[Any]) -> Iterator[Problem]:
    """Yield a problem for each direct child whose class lacks a method of its slot's protocol, or takes other arguments.

    Only methods of classes are checked. Attributes exist only on instances, and the result of a factory function is
    unknown until it is called.
    """
    below = get_fields(value)
    for name, annotation in resolve_hints(type(value)).items():
        protocol = _protocol(annotation)
        if protocol is None:
            continue
        for path, part in _nodes(below.get(name), name):
            owner = type(part).owner or _find_built_type(type(part))
            if not inspect.isclass(owner) or type(part).__configured__:
                continue
            if misfit := _find_misfit(part, owner, protocol):
                yield Problem(
                    path=path,
                    message=f"{owner.__qualname__} does not implement {protocol.__name__}",
                    got=f"{owner.__module__}:{owner.__qualname__}, {misfit[0]}",
                    expected=f"a component with {misfit[1]}",
                    fix=f"use a component that implements {protocol.__name__}; `axlearn plugins list` shows what is installed",
                )


@functools.lru_cache(maxsize=4096)
def list_slots(cls: type, protocol: type) -> tuple[str, ...]:
    """Return the names of fields annotated `Node[protocol]`, including optional ones."""
    return tuple(name for name, annotation in resolve_hints(cls).items() if _protocol(annotation) is protocol)


def _find_misfit(part: Node[Any], owner: type, protocol: type) -> tuple[str, str] | None:
    """Return how a component differs from a protocol, and what the protocol has, or None if the component fits."""
    methods = list_methods(protocol)
    if missing := [method for method in methods if not _has(part, owner, method)]:
        return f"without {', '.join(missing)}", ", ".join(methods)
    for name in methods:
        own, expected = _find_signature(owner, name), _find_signature(protocol, name)
        if own is not None and expected is not None and not _accept_same_calls(own, expected):
            return f"with {name}{own}", f"{name}{expected}"
    return None


def _has(part: Node[Any], owner: object, method: str) -> bool:
    """Return True if a component has a method, or if it wraps a component that has it."""
    if inspect.isclass(owner) and callable(_find_member(owner, method)):
        return True
    below = (child for name, value in get_fields(part).items() for _, child in _nodes(value, name))
    return any(_has(child, type(child).owner or _find_built_type(type(child)), method) for child in below)


def _find_member(owner: type, name: str) -> Any:
    """Return a member of a class or None. Unlike `getattr`, ignore its metaclass, which makes every class callable."""
    return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)


def _find_signature(owner: type, name: str) -> inspect.Signature | None:
    """Return the arguments with which callers call a method, or None if they are unknown."""
    member = _find_member(owner, name)
    if not inspect.isfunction(member):
        return None
    signature = inspect.signature(member)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain[1:], return_annotation=signature.empty)


def _accept_same_calls(one: inspect.Signature, two: inspect.Signature) -> bool:
    """Return True if some number of positional arguments fits both signatures."""
    (least, most), (other_least, other_most) = _count_positional(one), _count_positional(two)
    return least <= other_most and other_least <= most


def _count_positional(signature: inspect.Signature) -> tuple[int, float]:
    """Return the least and the largest number of positional arguments."""
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in positional)
    return least, math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)


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
