"""Flatten a tree to a mapping from paths to values, and compare two trees."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from axlearn_core.config.node import (
    Kind,
    Node,
    get_field,
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


def leaves(tree: object, get_name: Callable[[Any], str] = qualified_name) -> list[Leaf]:
    """Return the leaves of a tree in order.

    Each node also has a leaf `<path>.type`, the name of its class. Interface fields, labels, and hidden defaults are omitted. Empty
    tuples and mappings are leaves.
    """
    result: list[Leaf] = []
    _visit(tree, "", "mathematics", get_name, lambda *leaf: result.append(Leaf(*leaf)))
    return result


def flatten(tree: object, get_name: Callable[[Any], str] = qualified_name) -> dict[str, Any]:
    """Return the values of all `leaves` by path."""
    return _flatten(tree, "", get_name)


def _flatten(tree: object, path: str, get_name: Callable[[Any], str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    _visit(tree, path, "mathematics", get_name, lambda path, value, _: result.__setitem__(path, value))
    return result


def _visit(value: object, path: str, kind: Kind, get_name: Callable[[Any], str], add: Callable[..., None]) -> None:
    if isinstance(value, Node):
        add(join(path, "type"), get_name(type(value)), kind)
        for name, child in _shown_fields(value).items():
            _visit(child, join(path, name), field_kind(value, name) or kind, get_name, add)
    elif _has_leaves(value):
        for name, child in children(value).items():
            _visit(child, join(path, name), kind, get_name, add)
    else:
        add(path, value, kind)


def _shown_fields(value: Node[Any]) -> dict[str, Any]:
    """Return the fields of a node that have leaves."""
    hidden = hidden_defaults(value)
    return {name: get_field(value, name) for name in _listed_fields(type(value)) if name not in hidden}


@functools.lru_cache(maxsize=4096)
def _listed_fields(cls: type) -> tuple[str, ...]:
    omitted = interface_fields(cls) | label_fields(cls)
    return tuple(a.name for a in attrs.fields(cls) if a.name not in omitted)


def _has_leaves(value: object) -> bool:
    """Return True for mappings with items, and for tuples that contain nodes or mappings."""
    if isinstance(value, tuple):
        return any(isinstance(v, (Node, Mapping)) for v in value)
    return not isinstance(value, _SCALARS) and isinstance(value, Mapping) and bool(value)


_SCALARS = (str, int, float, type(None))


def field_kind(value: Node[Any], name: str) -> Kind | None:
    """Return the kind of a field, or None if it inherits the kind of the slot that contains the node.

    If a class adds a field to the class that it `computes_like`, the field counts as execution at its default value.
    """
    kind, adds, default = _marks(type(value))[name]
    return "execution" if kind is None and adds and get_field(value, name) == default else kind


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
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    _flatten_unequal(old, new, "", get_name, before, after)
    changes = [
        Change(path, before.get(path, ABSENT), value)
        for path, value in after.items()
        if path not in before or before[path] != value or type(before[path]) is not type(value)
    ]
    return Changes((*changes, *(Change(path, value, ABSENT) for path, value in before.items() if path not in after)))


def _flatten_unequal(
    old: object, new: object, path: str, get_name: Callable[[Any], str], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Add the leaves below `path` to `before` and `after`, without subtrees that are the same object in both."""
    if old is new:
        return
    if isinstance(old, Node) and isinstance(new, Node) and type(old) is type(new):
        earlier, later = _shown_fields(old), _shown_fields(new)
    elif _has_leaves(old) and _has_leaves(new):
        earlier, later = children(old), children(new)
    else:
        before.update({} if old is ABSENT else _flatten(old, path, get_name))
        after.update({} if new is ABSENT else _flatten(new, path, get_name))
        return
    for name in later | earlier:
        pair = (earlier.get(name, ABSENT), later.get(name, ABSENT))
        _flatten_unequal(*pair, join(path, name), get_name, before, after)
