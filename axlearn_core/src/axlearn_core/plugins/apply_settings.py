"""Apply settings to a config, and describe what they changed: sources, problems, and replaced nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.config import Change, Decoder, Node, diff, find, flatten, get_fields, patch
from axlearn_core.config.node import hidden_defaults, interface_fields
from axlearn_core.config.tree import join, leave_out_wrappers, locate, matches, replaced_nodes
from axlearn_core.config.types import show
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.request import Setting

NameOf = Callable[[Any], str]
"""Maps a config class to the name to show to the user."""


def apply_settings(
    tree: Node[Any], settings: Sequence[Setting], names: Registry, decoder: Decoder
) -> tuple[Node[Any], list[Change]]:
    """Apply settings to a tree.

    Returns:
        The tree and the changes. Setting a path to its current value also counts as a change, because it is explicit.

    Raises:
        ConfigError: If a path is set to two values or does not exist, or if a value is invalid.
    """
    edits: dict[str, Setting] = {}
    located: dict[str, Setting] = {}
    for setting in settings:
        edits.setdefault(setting.path, setting)
        first = located.setdefault(_locate(tree, setting.path), setting)
        if first.value != setting.value or type(first.value) is not type(setting.value):
            raise ConfigError(
                Problem(
                    path=setting.path,
                    message="is set to two different values",
                    got=f"{show(first.value)} by {first.location} and {show(setting.value)} by {setting.location}",
                )
            )
    try:
        after = patch(tree, {path: s.value for path, s in edits.items()}, decoder.decode_value)
    except ConfigError as error:
        paths = {s.path: s for s in reversed(settings)}
        raise ConfigError(_locate_problem(p, settings, paths, tree) for p in error.problems) from None
    changes = {c.path: c for c in diff(tree, after, names.display_name)}
    flat = flatten(after, names.display_name)
    for pattern in edits:
        for path in _matching_leaves(after, pattern, flat):
            changes.setdefault(path, Change(path, flat[path], flat[path]))
    return after, list(changes.values())


def _locate(tree: Node[Any], path: str) -> str:
    """Return a path with all wrappers, or the path itself if it is a pattern or does not exist."""
    try:
        return path if "*" in path else locate(tree, path, hint=False)
    except ConfigError:
        return path


def _matching_leaves(tree: Node[Any], pattern: str, flat: Mapping[str, Any]) -> Iterable[str]:
    """Return the paths of leaves that a setting names, also without the wrappers of a node."""
    if "*" in pattern:
        named = {*find(tree, pattern)}
        return [path for path in flat if path in named or matches(pattern, path)]
    return [path for path in {pattern, locate(tree, pattern)} if path in flat]


class SettingIndex:
    """Finds the setting that determines a path of a config.

    Args:
        settings: The settings, of which there is at least one.
        tree: Config with the settings.
    """

    def __init__(self, settings: Sequence[Setting], tree: Node[Any]):
        self.settings, self.tree = settings, tree
        self._exact: dict[str, int] = {}
        self._patterns: list[int] = []
        for i, setting in enumerate(settings):
            if any(character in setting.path for character in "*?["):
                self._patterns.append(i)
            else:
                self._exact.setdefault(setting.path, i)
        self._by_path: dict[str, Setting | None] = {}

    def find(self, path: str) -> Setting | None:
        """Return the innermost setting that matches the path or one of its parents, or None."""
        if path not in self._by_path:
            setting = self._match(path) or self._match(leave_out_wrappers(self.tree, path))
            parent = path.rpartition(".")[0]
            self._by_path[path] = setting or (self.find(parent) if parent else None)
        return self._by_path[path]

    def names(self, path: str) -> bool:
        """Return whether a setting is for exactly this path."""
        return (self._match(path) or self._match(leave_out_wrappers(self.tree, path))) is not None

    def find_source(self, path: str) -> str:
        """Return the location of the setting that changed a path."""
        return (self.find(path) or self.settings[0]).location

    def _match(self, name: str) -> Setting | None:
        """Return the first setting for a path."""
        positions = [i for i in self._patterns if matches(self.settings[i].path, name)]
        positions += [self._exact[name]] if name in self._exact else []
        return self.settings[min(positions)] if positions else None


def _locate_problem(
    problem: Problem, settings: Sequence[Setting], paths: Mapping[str, Setting], tree: Node[Any]
) -> Problem:
    source = paths.get(problem.path) or SettingIndex(settings, tree).find(problem.path)
    return attrs.evolve(problem, location=source.location) if source and not problem.location else problem


def describe_replaced(
    before: Node[Any], after: Node[Any], settings: Iterable[Setting], name_of: NameOf
) -> list[Decision]:
    """Return a decision for each setting that replaces nodes with plain values, such as a schedule with a number.

    The fields of these nodes are lost.

    Args:
        before: Config without the settings.
        after: Config with the settings.
        settings: The settings.
        name_of: Returns the name of a config class.
    """
    by_path = {setting.path: setting for setting in settings}
    decisions = []
    for path, setting in by_path.items():
        if any(path.startswith(f"{other}.") for other in by_path):
            continue  # inside a component that another setting names
        if replaced := replaced_nodes(before, after, path):
            decisions.append(_describe(setting, replaced, name_of))
    return decisions


def _describe(setting: Setting, replaced: Mapping[str, tuple[Node[Any], Any]], name_of: NameOf) -> Decision:
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
    """Return an example setting for the node's first field that accepts the value, or None."""
    for attribute in attrs.fields(type(old)):
        field = get_fields(old)[attribute.name]
        if attribute.name not in interface_fields(type(old)) and type(field) is type(new):
            return f"--set {join(path, attribute.name)}={new!r}"
    return None
