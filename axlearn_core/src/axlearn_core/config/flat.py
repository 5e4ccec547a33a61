"""A tree as flat `path -> value` lines, and the difference of two trees."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from axlearn_core.config.node import Node, interface_fields
from axlearn_core.config.tree import children, join


def qualified_name(cls: Any) -> str:
    """`module:Class` of what a config class configures."""
    owner = cls.owner or cls
    return f"{owner.__module__}:{owner.__qualname__}"


def flatten(tree: Any, name_of: Callable[[Any], str] = qualified_name) -> dict[str, Any]:
    """Path -> leaf value in tree order; each node also gives `<path>.type`, its class by `name_of`.

    Interface fields are left out: the parent fills them. Empty tuples and mappings are leaves.
    """
    flat: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Node):
            flat[join(path, "type")] = name_of(type(value))
            hidden = interface_fields(type(value))
            for name, child in children(value).items():
                if name not in hidden:
                    visit(child, join(path, name))
        elif isinstance(value, (tuple, Mapping)) and any(
            isinstance(v, (Node, Mapping)) for v in children(value).values()
        ):
            for name, child in children(value).items():
                visit(child, join(path, name))
        elif isinstance(value, Mapping) and value:
            for name, child in value.items():
                visit(child, join(path, str(name)))
        else:
            flat[path] = value

    visit(tree, "")
    return flat


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


def diff(old: Any, new: Any, name_of: Callable[[Any], str] = qualified_name) -> tuple[Change, ...]:
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
