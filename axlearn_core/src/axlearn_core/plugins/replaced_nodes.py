"""Describe the config nodes that a setting replaces by a plain value, such as a schedule by a number."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, get_fields
from axlearn_core.config.node import hidden_defaults, interface_fields
from axlearn_core.config.tree import join
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.request import Setting

NameOf = Callable[[Any], str]
"""Function from a config class to its name for the user."""


def describe_replaced(setting: Setting, replaced: Mapping[str, tuple[Node[Any], Any]], name_of: NameOf) -> Decision:
    """Return the decision for a setting that replaces nodes, whose fields are lost.

    Args:
        setting: The setting.
        replaced: Path -> node and its new value.
        name_of: Returns the name of a config class.
    """
    (path, (old, new)), *others = replaced.items()
    more = f" and {len(others)} more" if others else ""
    hint = f"; to change one field: {example}" if (example := _example(path, old, new)) else ""
    return Decision("replaced", f"{path}{more}", f"{_show_node(old, name_of)} -> {new!r}, by {setting.location}{hint}")


def _show_node(value: Node[Any], name_of: NameOf) -> str:
    hidden = interface_fields(type(value)) | hidden_defaults(value)
    fields = {name: field for name, field in get_fields(value).items() if name not in hidden}
    texts = (
        f"{name}={name_of(type(field)) if isinstance(field, Node) else repr(field)}" for name, field in fields.items()
    )
    return f"{name_of(type(value))}({', '.join(texts)})"


def _example(path: str, old: Node[Any], new: object) -> str | None:
    """Return a setting of the node's first field that accepts the value, or None."""
    for attribute in attrs.fields(type(old)):
        field = get_fields(old)[attribute.name]
        if attribute.name not in interface_fields(type(old)) and type(field) is type(new):
            return f"--set {join(path, attribute.name)}={new!r}"
    return None
