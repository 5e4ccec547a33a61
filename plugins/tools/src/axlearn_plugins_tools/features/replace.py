"""The feature `replace`."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, fields_of, find, matches, node, replace_config
from axlearn_core.config.tree import SKIP, edit_nodes, expand, get
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.registry import registry
from axlearn_plugins_tools.features.edit import component, component_problems

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Replace(Feature):
    """Puts a component in the place of others, chosen by their path, by what they are, or by both.

    `component` is the name of a registered component (`layer-norm`), `settings` are its settings (`{bias: false}`).
    `path` is a path or pattern of nodes (`model.decoder.layer.norm`, `**.norm`); `target` is the name of a component:
    its nodes are replaced, at `path` where both are given.

    What is taken over: each field that both have, child nodes included, with the value of the old node wherever that
    value was set and `settings` do not give another. What the old node was set to and the new one has no field for is
    an error, unless `drop` names the field. A node that is of the new class already keeps its settings and gets those
    that are given. What is inside a replaced node is not searched.
    """

    stage = "replace"
    example = "target=rms-norm,component=layer-norm"

    component: str = REQUIRED
    settings: Mapping[str, Any] = {}
    path: str | None = None
    target: str | None = None
    drop: tuple[str, ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Nothing says what to replace, or by what."""
        yield from component_problems(self.component, self.settings)
        if self.path is None and self.target is None:
            yield Problem(path="target", message="nothing says what to replace", expected="path, target, or both")

    def apply(self, cfg: Tree) -> Tree:
        """Swaps every node that is meant."""
        new, settings = component(self.component, self.settings)
        if self.path is not None:
            _expect_nodes(cfg, self.path)
        kind = registry().component(self.target) if self.target is not None else Node

        def swap(path: str, value: Any) -> Any:
            if self.path is not None and not matches(self.path, path):
                return None
            if type(value) is type(new):
                meant = self.path is not None or isinstance(value, kind)
                return attrs.evolve(value, **settings) if meant else SKIP  # else: placed before
            if not isinstance(value, kind):
                return None
            try:
                return attrs.evolve(replace_config(value, type(value), new, self.drop), **settings)
            except ConfigError as error:
                raise ConfigError(attrs.evolve(p, fix=_fix(p)) for p in error.problems) from None

        nothing = None if _is_there(cfg, type(new), settings) else self._nothing(cfg)
        return edit_nodes(cfg, swap, nothing=nothing, outermost=True)

    def _nothing(self, cfg: Node[Any]) -> Problem:
        kinds = ", ".join(sorted({registry().display_name(type(n)) for n in find(cfg, Node).values()}))
        place = f" at {self.path}" if self.path else ""
        return Problem(
            path=self.path or "",
            message=f"nothing to replace: there is no {self.target}{place}",
            expected=f"one of {kinds}",
        )


def _is_there(cfg: Node[Any], kind: type, settings: Mapping[str, Any]) -> bool:
    return any(all(fields_of(n)[k] == v for k, v in settings.items()) for n in find(cfg, kind).values())


def _expect_nodes(cfg: Node[Any], pattern: str) -> None:
    """Raises `ConfigError` where a path does not exist or holds no node; None stands for a child that is left out."""
    paths = expand(cfg, pattern)
    if not any(isinstance(get(cfg, path), Node) for path in paths):
        raise ConfigError(
            Problem(
                path=pattern,
                message="holds no component that could be replaced",
                got=repr(get(cfg, paths[0])),
                fix=f"set it: --set {pattern}=...",
            )
        )


def _fix(problem: Problem) -> str:
    return f"--with replace:...,drop=[{problem.path.rpartition('.')[2]}] lets it go"
