"""Arguments that a slot offers to its component.

    @offers("directory")
    class Checkpointer(Protocol): ...

With this declaration, a parent with the field `checkpointer: Node[Checkpointer]` calls `build(directory=...)`. A component
declares the arguments that it needs as `interface()` fields or as keyword arguments of its constructor. The config check
reports a component that requires an argument its slot does not offer, before anything is built.
"""

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

from axlearn_core.config.node import REQUIRED, Node, get_fields, interface_fields, required_arguments, resolve_hints
from axlearn_core.errors import Problem

P = TypeVar("P", bound=type)


def offers(*names: str) -> Callable[[P], P]:
    """Declare which arguments a parent passes to `build` of a component that implements the protocol."""

    def declare(protocol: P) -> P:
        protocol.__offers__ = frozenset(names)  # type: ignore[attr-defined]
        return protocol

    return declare


def find_offer(annotation: object) -> tuple[str, frozenset[str]] | None:
    """Return the protocol's name and its offered arguments for an annotation, or None if it declares no offers."""
    for part in typing.get_args(annotation):
        names = vars(part).get("__offers__") if isinstance(part, type) else None
        if names is not None:
            return part.__name__, names
        if (below := find_offer(part)) is not None:
            return below
    return None


def list_required_arguments(cls: type[Node[Any]]) -> frozenset[str]:
    """Return the arguments that a parent must offer to build a component."""
    fields = frozenset(a.name for a in attrs.fields(cls) if a.name in interface_fields(cls) and a.default is REQUIRED)
    if cls.__configured__:
        return fields | {name.partition("=")[2] or name for name in cls.__interface__}
    if cls.owner is None or cls.build is not Node.build:
        return fields
    return fields | required_arguments(cls.owner.__init__, 2)


def check_offers(node: object) -> Iterator[Problem]:
    """Yield a problem for each direct child that requires an argument its slot does not offer. Paths are relative."""
    fields = get_fields(node)
    for name, (protocol, offered) in _slots(type(node)).items():
        value = fields[name]
        for path, component in _components(value, name):
            if missing := sorted(list_required_arguments(type(component)) - offered):
                yield Problem(
                    path=path,
                    message=f"{type(component).__qualname__} requires {', '.join(missing)}",
                    expected=f"{protocol}, which is offered {', '.join(sorted(offered)) or 'no arguments'}",
                    fix="give the argument a default, or set it in the component's config",
                )


@functools.lru_cache(maxsize=4096)
def _slots(cls: type[Node[Any]]) -> dict[str, tuple[str, frozenset[str]]]:
    slots = {name: find_offer(annotation) for name, annotation in resolve_hints(cls).items()}
    return {name: slot for name, slot in slots.items() if slot is not None}


def _components(value: Any, path: str) -> Iterator[tuple[str, Node[Any]]]:
    if isinstance(value, Node):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _components(item, f"{path}.{i}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _components(item, f"{path}.{key}")
