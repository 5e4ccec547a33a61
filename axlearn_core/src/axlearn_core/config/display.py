"""Show configs and differences to people: as text in a console, and as HTML in a notebook.

Both show what differs from the defaults. `axlearn_core.render` returns every value.
"""

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config.flat import ABSENT, Change, is_named, qualified_name
from axlearn_core.config.html import fold, fragment, table, tag, text
from axlearn_core.config.node import REQUIRED, Node, get_fields, interface_fields
from axlearn_core.config.types import freeze
from axlearn_core.errors import counted

WIDTH = 88
"""Maximum width, in characters, of a node on one line."""

_exact = contextvars.ContextVar("exact", default=False)


def exact_repr(value: object) -> str:
    """Return `repr(value)`, with every field of every node. Hashes depend on this text, so it must not change."""
    token = _exact.set(True)
    try:
        return repr(value)
    finally:
        _exact.reset(token)


def is_exact() -> bool:
    """Return True inside `exact_repr`."""
    return _exact.get()


def show_config(config: Node[Any]) -> str:
    """Return the fields that differ from the defaults, as a call if it fits on one line, or else as an indented tree."""
    if is_exact():
        fields = ", ".join(f"{name}={value!r}" for name, value in get_fields(config).items())
        return f"{type(config).__qualname__.rsplit('>.', 1)[-1]}({fields})"
    return "\n".join(_lines(config, "", ""))


def one_line(value: object) -> str:
    """Return a value on one line. For a node, the call that creates it."""
    if isinstance(value, Node):
        fields = ", ".join(f"{name}={one_line(child)}" for name, child in changed_fields(value).items())
        title = _title(value)
        if type(value).__configured__:
            return f"{title.removesuffix(')')}, {fields})" if fields else title
        return f"{title}({fields})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {one_line(child)}" for key, child in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(one_line, value))}{',' if len(value) == 1 else ''})"
    return qualified_name(value) if is_named(value) else repr(value)


def changed_fields(config: Node[Any]) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and the required fields that are not set."""
    hidden = interface_fields(type(config))
    return {
        attribute.name: value
        for attribute, value in zip(attrs.fields(type(config)), get_fields(config).values(), strict=True)
        if not _is_default(value, attribute.default) or (value is REQUIRED and attribute.name not in hidden)
    }


def _is_default(value: object, default: object) -> bool:
    same: object = isinstance(value, bool) == isinstance(default, bool) and value == freeze(default)
    return value is default or same is True  # comparing arrays does not return a bool


def _title(config: Node[Any]) -> str:
    return type(config).__qualname__.rsplit("<locals>.", 1)[-1]


def _lines(value: object, label: str, indent: str) -> Iterator[str]:
    line = f"{indent}{label}{one_line(value)}"
    below = _below(value)
    if not below or len(line) <= WIDTH:
        yield line
        return
    yield f"{indent}{label}{_title(value)}" if isinstance(value, Node) else f"{indent}{label}".rstrip()
    for name, child in below:
        yield from _lines(child, "- " if isinstance(value, tuple) else f"{name}: ", f"{indent}  ")


def _below(value: object) -> list[tuple[str, Any]]:
    if isinstance(value, Node):
        return list(changed_fields(value).items())
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    return [(str(i), child) for i, child in enumerate(value)] if isinstance(value, tuple) else []


def config_html(config: Node[Any]) -> str:
    """Return a config as collapsible nested lists. Fields that have their default values are collapsed."""
    return fragment(_html(config, "", is_open=True))


def _html(value: object, name: str, *, is_open: bool = False) -> str:
    label = f"{text(name)}: " if name else ""
    if not isinstance(value, Node):
        below = _below(value)
        if not any(isinstance(child, Node | Mapping | tuple) for _, child in below):
            return tag("div", f"{label}{tag('b', text(one_line(value)))}")
        return fold(label.rstrip(), "".join(_html(child, name) for name, child in below), is_open=True)
    changed = changed_fields(value)
    hidden = interface_fields(type(value)) | changed.keys()
    defaults = {k: v for k, v in get_fields(value).items() if k not in hidden}
    content = "".join(_html(child, k) for k, child in changed.items())
    if defaults:
        title = counted(len(defaults), "default")
        content += fold(title, "".join(_html(child, k) for k, child in defaults.items()), kind="dim")
    summary = f"{label}{tag('b', text(_title(value)))}"
    return fold(summary, content, is_open=is_open) if content else tag("div", summary)


SHOWN_CHANGES = 40
"""Maximum number of changes in a table that is initially expanded."""

_MARKS = {"added": "+", "removed": "-", "changed": "~"}


def changes_text(changes: Sequence[Change]) -> str:
    """Return the changes as text, one per line."""
    return "\n".join(map(change_text, changes)) if changes else "(no changes)"


def change_text(change: Change) -> str:
    """Return a change on one line: `~ path: old -> new`, `+ path: new`, or `- path: old`."""
    values = [one_line(value) for value in (change.old, change.new) if value is not ABSENT]
    return f"{_MARKS[change.kind]} {change.path}: {' -> '.join(values)}"


def changes_html(changes: Sequence[Change]) -> str:
    """Return the changes as a collapsible table."""
    rows = (
        [
            tag("span", _MARKS[change.kind], change.kind),
            text(change.path),
            *("" if value is ABSENT else text(one_line(value)) for value in (change.old, change.new)),
        ]
        for change in changes
    )
    title = counted(len(changes), "change")
    return fragment(fold(title, table(rows, ("", "path", "old", "new")), is_open=len(changes) <= SHOWN_CHANGES))
