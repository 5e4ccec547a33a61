"""Flatten a tree to a mapping from paths to values, and compare two trees."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from axlearn_core.config.node import (
    Kind,
    Node,
    get_fields,
    hidden_defaults,
    interface_fields,
    is_node,
    label_fields,
    marked_kind,
)
from axlearn_core.config.tree import children, join


def qualified_name(cls: Any) -> str:
    """Return `module:Class` for a class or function. For a config class, use its owner."""
    owner = (cls.owner if is_node(cls) else None) or cls
    while isinstance(owner, functools.partial):
        owner = owner.func
    return f"{owner.__module__}:{owner.__qualname__ if is_named(owner) else type(owner).__qualname__}"


def is_named(value: object) -> bool:
    """Return True if a value has a qualified name, as classes and functions do."""
    return hasattr(value, "__qualname__")


@attrs.frozen
class Leaf:
    """A value in a tree, with its path and kind."""

    path: str
    value: Any
    kind: Kind


def leaves(tree: object, get_name: Callable[[Any], str] = qualified_name) -> Iterator[Leaf]:
    """Yield the leaves of a tree in order.

    Each node also yields `<path>.type`, the name of its class. Interface fields, labels, and hidden defaults are omitted. Empty
    tuples and mappings are leaves.
    """
    return _leaves(tree, "", "mathematics", get_name)


def _leaves(value: object, path: str, kind: Kind, get_name: Callable[[Any], str]) -> Iterator[Leaf]:
    if isinstance(value, Node):
        yield Leaf(join(path, "type"), get_name(type(value)), kind)
        hidden = interface_fields(type(value)) | label_fields(type(value)) | hidden_defaults(value)
        for name, child in children(value).items():
            if name not in hidden:
                yield from _leaves(child, join(path, name), field_kind(value, name) or kind, get_name)
    elif (isinstance(value, Mapping) and value) or (
        isinstance(value, tuple) and any(isinstance(v, (Node, Mapping)) for v in value)
    ):
        for name, child in children(value).items():
            yield from _leaves(child, join(path, name), kind, get_name)
    else:
        yield Leaf(path, value, kind)


def flatten(tree: object, get_name: Callable[[Any], str] = qualified_name) -> dict[str, Any]:
    """Return the values of all `leaves` by path."""
    return {leaf.path: leaf.value for leaf in leaves(tree, get_name)}


def field_kind(value: Node[Any], name: str) -> Kind | None:
    """Return the kind of a field, or None if it inherits the kind of the slot that contains the node.

    If a class adds a field to the class that it `computes_like`, the field counts as execution at its default value.
    """
    kind, adds, default = _marks(type(value))[name]
    return "execution" if kind is None and adds and get_fields(value)[name] == default else kind


@functools.lru_cache(maxsize=4096)
def _marks(cls: type) -> dict[str, tuple[Kind | None, bool, Any]]:
    like = vars(cls).get("computes_like")
    names = {a.name for a in attrs.fields(like or cls)}
    return {a.name: (marked_kind(a), a.name not in names, a.default) for a in attrs.fields(cls)}


@attrs.frozen
class Change:
    """A difference between two trees. `old` or `new` is `ABSENT` if that tree lacks the path."""

    path: str
    old: Any
    new: Any

    @property
    def kind(self) -> str:
        """`added`, `removed`, or `changed`."""
        if self.old is ABSENT:
            return "added"
        return "removed" if self.new is ABSENT else "changed"

    def __str__(self) -> str:
        from axlearn_core.config.display import change_text

        return change_text(self)


class Changes(tuple[Change, ...]):
    """The differences between two trees, in order. `print` shows one per line, and a notebook shows a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from axlearn_core.config.display import changes_text, is_exact

        return super().__repr__() if is_exact() else changes_text(self)

    def _repr_html_(self) -> str:
        from axlearn_core.config.display import changes_html

        return changes_html(self)


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def diff(old: object, new: object, get_name: Callable[[Any], str] = qualified_name) -> Changes:
    """Return the differences between two trees, ordered as in the new tree, with removed paths last."""
    if old is new:
        return Changes()
    before, after = flatten(old, get_name), flatten(new, get_name)
    changes = [
        Change(path, before.get(path, ABSENT), value)
        for path, value in after.items()
        if path not in before or before[path] != value or type(before[path]) is not type(value)
    ]
    return Changes((*changes, *(Change(path, value, ABSENT) for path, value in before.items() if path not in after)))
