"""What a slot offers to the component that stands in it, and what components ask for.

    @offers("directory")
    class Checkpointer(Protocol): ...

A field `checkpointer: Node[Checkpointer]` is then such a slot: its parent calls `build(directory=...)`. A component takes
what it declares, as `interface()` fields or as keyword arguments of its constructor. One that cannot do without a value
that its slot does not offer is reported when the config is checked, before anything is built.
"""

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

from axlearn_core.config.node import REQUIRED, Node, fields_of, hints_of, interface_fields, required_arguments
from axlearn_core.errors import Problem

P = TypeVar("P", bound=type)


def offers(*names: str) -> Callable[[P], P]:
    """Declares on a slot's protocol what a parent offers at `build` to the component in the slot."""

    def declare(protocol: P) -> P:
        protocol.__offers__ = frozenset(names)  # type: ignore[attr-defined]
        return protocol

    return declare


def offered_by(annotation: object) -> tuple[str, frozenset[str]] | None:
    """(the protocol's name, what its slots offer) of a field's annotation; None where it is not a slot that declares it."""
    for part in typing.get_args(annotation):
        names = vars(part).get("__offers__") if isinstance(part, type) else None
        if names is not None:
            return part.__name__, names
        if (below := offered_by(part)) is not None:
            return below
    return None


def asked_for(cls: type[Node[Any]]) -> frozenset[str]:
    """The names that a component cannot be built without, of those that its parent has to offer."""
    fields = frozenset(a.name for a in attrs.fields(cls) if a.name in interface_fields(cls) and a.default is REQUIRED)
    if cls.__configured__:
        return fields | {name.partition("=")[2] or name for name in cls.__interface__}
    if cls.owner is None or cls.build is not Node.build:
        return fields
    return fields | required_arguments(cls.owner.__init__, 2)


def refused(node: object) -> Iterator[Problem]:
    """The components directly below a node that ask for what their slot does not offer; paths relative to the node."""
    fields = fields_of(node)
    for name, (protocol, offered) in _slots(type(node)).items():
        value = fields[name]
        for path, component in _components(value, name):
            if lacking := sorted(asked_for(type(component)) - offered):
                yield Problem(
                    path=path,
                    message=f"{type(component).__qualname__} asks for {', '.join(lacking)}",
                    expected=f"a {protocol}, which is offered {', '.join(sorted(offered)) or 'nothing'}",
                    fix="give the argument a default, or set it in the component's own config",
                )


@functools.lru_cache(maxsize=4096)
def _slots(cls: type[Node[Any]]) -> dict[str, tuple[str, frozenset[str]]]:
    slots = {name: offered_by(annotation) for name, annotation in hints_of(cls).items()}
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
