"""Choice of the formats of a model, by name or by its chat template."""

from typing import Literal, TypeVar, get_args

from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import Entry, registry
from axlearn_plugins_serving.parsers.answer_formats import ReasoningFormat, ToolFormat

NONE = "none"
"""Name that switches a kind of parser off."""
_F = TypeVar("_F", ReasoningFormat, ToolFormat)
Group = Literal["tool_parsers", "reasoning_parsers"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""Groups of entry points of tool formats and reasoning formats."""


def choose_tool_format(template: str | None, name: str | None = None) -> ToolFormat | None:
    """Return the syntax in which a model calls tools.

    Args:
        template: Source of the chat template, or None if the model has none.
        name: Name of the format, `none`, or None to choose the format that matches the template.

    Returns:
        The format, or None if `name` is `none` or no format matches.

    Raises:
        RequestError: If the name is unknown, or if several formats match.
        PluginError: If a plugin cannot be loaded.
    """
    return _choose("tool_parsers", ToolFormat, template, name)


def choose_reasoning_format(template: str | None, name: str | None = None) -> ReasoningFormat | None:
    """Return the syntax in which a model reasons. See `choose_tool_format`."""
    return _choose("reasoning_parsers", ReasoningFormat, template, name)


def _choose(group: Group, cls: type[_F], template: str | None, name: str | None) -> _F | None:
    if name == NONE:
        return None
    if name is not None:
        return _load(registry().entry(group, name), cls)
    if template is None:
        return None
    formats = {entry.name: _load(entry, cls) for entry in registry().entries(group)}
    names = [name for name, candidate in formats.items() if candidate.matches(template)]
    if len(names) > 1:
        option = "--" + group.removesuffix("s").replace("_", "-")
        raise RequestError(
            f"several {group.replace('_', ' ')} match the chat template\n    got: {', '.join(names)}\n"
            f"    expected: one match\n    fix: choose one with {option} {names[0]}, or switch them off with {option} {NONE}"
        )
    return formats[names[0]] if names else None


def _load(entry: Entry, cls: type[_F]) -> _F:
    loaded = entry.load()
    if not (isinstance(loaded, type) and issubclass(loaded, cls)):
        raise PluginError(f"the {entry} is {loaded!r}, not a {cls.__name__} class\n    fix: {entry.remedy}")
    return loaded()
