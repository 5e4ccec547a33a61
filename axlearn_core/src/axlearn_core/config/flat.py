"""A tree as flat `path -> value` lines, and the difference of two trees."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from axlearn_core.config.node import Kind, Node, fields_of, hidden_defaults, interface_fields, is_node, marked_kind
from axlearn_core.config.tree import children, join


def qualified_name(cls: Any) -> str:
    """`module:Class` of a class or function, or of what a config class configures."""
    owner = (cls.owner if is_node(cls) else None) or cls
    while isinstance(owner, functools.partial):
        owner = owner.func
    return f"{owner.__module__}:{owner.__qualname__ if is_named(owner) else type(owner).__qualname__}"


def is_named(value: object) -> bool:
    """Whether a value is a class or function, or another callable that says what it is called."""
    return hasattr(value, "__qualname__")


@attrs.frozen
class Leaf:
    """One value of a tree: its path, and what it changes."""

    path: str
    value: Any
    kind: Kind


def leaves(tree: object, name_of: Callable[[Any], str] = qualified_name) -> Iterator[Leaf]:
    """The values of a tree in its order; each node also gives `<path>.type`, its class by `name_of`.

    Interface fields are left out, since the parent fills them, and fields at a default that is hidden. Empty tuples and
    mappings are leaves.
    """
    return _leaves(tree, "", "mathematics", name_of)


def _leaves(value: object, path: str, kind: Kind, name_of: Callable[[Any], str]) -> Iterator[Leaf]:
    if isinstance(value, Node):
        yield Leaf(join(path, "type"), name_of(type(value)), kind)
        hidden = interface_fields(type(value)) | hidden_defaults(value)
        for name, child in children(value).items():
            if name not in hidden:
                yield from _leaves(child, join(path, name), field_kind(value, name) or kind, name_of)
    elif (isinstance(value, Mapping) and value) or (
        isinstance(value, tuple) and any(isinstance(v, (Node, Mapping)) for v in value)
    ):
        for name, child in children(value).items():
            yield from _leaves(child, join(path, name), kind, name_of)
    else:
        yield Leaf(path, value, kind)


def flatten(tree: object, name_of: Callable[[Any], str] = qualified_name) -> dict[str, Any]:
    """Path -> value of each of the tree's `leaves`."""
    return {leaf.path: leaf.value for leaf in leaves(tree, name_of)}


def field_kind(value: Node[Any], name: str) -> Kind | None:
    """What a field of a node changes; None where that is up to the slot that the node stands in.

    A field that a class adds to the one that it `computes_like` changes nothing while it is at its default.
    """
    kind, adds, default = _marks(type(value))[name]
    return "execution" if kind is None and adds and fields_of(value)[name] == default else kind


@functools.lru_cache(maxsize=4096)
def _marks(cls: type) -> dict[str, tuple[Kind | None, bool, Any]]:
    like = vars(cls).get("computes_like")
    names = {a.name for a in attrs.fields(like or cls)}
    return {a.name: (marked_kind(a), a.name not in names, a.default) for a in attrs.fields(cls)}


@attrs.frozen
class Change:
    """One path at which two trees differ; `old` or `new` is `ABSENT` where only the other tree has it."""

    path: str
    old: Any
    new: Any

    @property
    def kind(self) -> str:
        """`added`, `removed` or `changed`."""
        if self.old is ABSENT:
            return "added"
        return "removed" if self.new is ABSENT else "changed"


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def diff(old: object, new: object, name_of: Callable[[Any], str] = qualified_name) -> tuple[Change, ...]:
    """The paths at which two trees differ, in the order of the new tree, removed ones last."""
    if old is new:
        return ()
    before, after = flatten(old, name_of), flatten(new, name_of)
    changes = [
        Change(path, before.get(path, ABSENT), value)
        for path, value in after.items()
        if path not in before or before[path] != value or type(before[path]) is not type(value)
    ]
    return (*changes, *(Change(path, value, ABSENT) for path, value in before.items() if path not in after))
