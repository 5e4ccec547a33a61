"""Nodes that stand for other nodes in a slot: wrappers, such as a map with adapters, and alternatives for different layers.

The class attribute `Node.wraps` names the fields with these other nodes. A wrapper has one such node. A node with alternatives has
tuples of them. The slot of a node is its path without the wrappers and alternatives around it: `attention.base.children.1.query`
has the slot `attention.query`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from axlearn_core.config.node import Node, field_names, get_field


def wrapped_nodes(value: object) -> dict[str, Node[Any]]:
    """Return the nodes that a node stands for by relative path (`base`, `children.1`). Return an empty dict for other values."""
    if not isinstance(value, Node):
        return {}
    nodes = {}
    for name in _wrapping_fields(type(value)):
        below = get_field(value, name)
        if isinstance(below, Node):
            nodes[name] = below
        elif isinstance(below, tuple):
            nodes |= {f"{name}.{i}": item for i, item in enumerate(below) if isinstance(item, Node)}
    return nodes


def wrapped_node(value: object) -> tuple[str, Node[Any]] | None:
    """Return the field and the node that a wrapper wraps, or None if the value is not a wrapper."""
    if not isinstance(value, Node):
        return None
    names = _wrapping_fields(type(value))
    return next(((name, get_field(value, name)) for name in names if isinstance(get_field(value, name), Node)), None)


@functools.lru_cache(maxsize=4096)
def _wrapping_fields(cls: type[Node[Any]]) -> tuple[str, ...]:
    return tuple(name for name in cls.wraps if name in field_names(cls))


def slot_nodes(value: object, path: str = "") -> Iterator[tuple[str, Node[Any]]]:
    """Yield the path and value of a node and of all nodes that it stands for, outermost first."""
    if isinstance(value, Node):
        yield path, value
        for name, below in wrapped_nodes(value).items():
            yield from slot_nodes(below, f"{path}.{name}" if path else name)


def edit_innermost(slot: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the value of a slot, or to each innermost node if the value stands for other nodes."""
    if not wrapped_nodes(slot):
        return change(slot)
    edits: dict[str, Any] = {}
    for name in _wrapping_fields(type(slot)):
        below = get_field(slot, name)
        if isinstance(below, Node):
            edits[name] = edit_innermost(below, change)
        elif isinstance(below, tuple):
            edits[name] = tuple(edit_innermost(item, change) if isinstance(item, Node) else item for item in below)
    return attrs.evolve(slot, **edits)
