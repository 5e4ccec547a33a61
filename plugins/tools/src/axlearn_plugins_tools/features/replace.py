"""The `replace` feature."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, find, get_fields, node, replace_config
from axlearn_core.config.tree import SKIP, edit_nodes, expand, get
from axlearn_core.config.wrappers import slot_nodes
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.registry import registry
from axlearn_plugins_tools.features.edit import component, component_problems

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Replace(Feature):
    """Replaces components. Select them by path, by name, or both.

    `component` is the name of a registered component (`layer-norm`). `settings` are its settings (`{bias: false}`).
    `path` is a path or pattern of nodes (`model.decoder.layer.norm`, `**.norm`). `target` is the name of the component
    to replace. If both are given, a node must match both.

    The new node copies every field that both nodes have, including child nodes, if the old node set it and `settings`
    do not. It is an error if the old node set a field that the new node does not have, unless `drop` names that field.
    A node that already has the new class keeps its settings and gets the given ones. Nodes inside a replaced node are
    not searched.
    """

    stage = "replace"
    example = "target=rms-norm,component=layer-norm"

    component: str = REQUIRED
    settings: Mapping[str, Any] = {}
    path: str | None = None
    target: str | None = None
    drop: tuple[str, ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Check the component and its settings, and that `path` or `target` is given."""
        yield from component_problems(self.component, self.settings)
        if self.path is None and self.target is None:
            yield Problem(
                path="target", message="no component to replace is selected", expected="path, target, or both"
            )

    def apply(self, cfg: Tree) -> Tree:
        """Replace every matching node."""
        new, settings = component(self.component, self.settings)
        selected = None if self.path is None else _expand_nodes(cfg, self.path)
        kind = registry().component(self.target) if self.target is not None else Node

        def swap(path: str, value: Any) -> Any:
            if selected is not None and path not in selected:
                return None
            if type(value) is type(new):
                is_selected = selected is not None or isinstance(value, kind)
                return attrs.evolve(value, **settings) if is_selected else SKIP  # already replaced
            if not isinstance(value, kind):
                return None
            try:
                return attrs.evolve(replace_config(value, type(value), new, self.drop), **settings)
            except ConfigError as error:
                raise ConfigError(attrs.evolve(p, fix=_fix(p)) for p in error.problems) from None

        problem = None if _was_replaced(cfg, kind, type(new), settings) else self._no_match(cfg)
        return edit_nodes(cfg, swap, no_match=problem, outermost=True)

    def _no_match(self, cfg: Node[Any]) -> Problem:
        kinds = ", ".join(sorted({registry().display_name(type(n)) for n in find(cfg, Node).values()}))
        place = f" at {self.path}" if self.path else ""
        return Problem(
            path=self.path or "",
            message=f"nothing to replace: there is no {self.target}{place}",
            expected=f"one of {kinds}",
        )


def _was_replaced(cfg: Node[Any], target: type, new: type, settings: Mapping[str, Any]) -> bool:
    """Return True if a config without the target looks as if its targets were replaced before.

    A node of the new class does not suffice, because the config may always have had it, and another feature may have replaced the
    targets. So if slots have the target as default, one of them must contain the new class.
    """
    if not any(all(get_fields(n)[k] == v for k, v in settings.items()) for n in find(cfg, new).values()):
        return False
    if target is Node:  # selected by path
        return True
    slots = [
        get_fields(owner)[field.name]
        for owner in find(cfg, Node).values()
        for field in attrs.fields(type(owner))
        if isinstance(field.default, target)
    ]
    return not slots or any(isinstance(node, new) for slot in slots for _, node in slot_nodes(slot))


def _expand_nodes(cfg: Node[Any], pattern: str) -> set[str]:
    """Return the paths that match a pattern. Raise `ConfigError` if the pattern matches nothing, or only omitted children."""
    paths = expand(cfg, pattern)
    if not any(isinstance(get(cfg, path), Node) for path in paths):
        raise ConfigError(
            Problem(
                path=pattern,
                message="there is no component to replace",
                got=repr(get(cfg, paths[0])),
                fix=f"set it: --set {pattern}=...",
            )
        )
    return {*paths}


def _fix(problem: Problem) -> str:
    return f"--with replace:...,drop=[{problem.path.rpartition('.')[2]}] discards this field"
