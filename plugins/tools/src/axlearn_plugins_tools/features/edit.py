"""Helpers for features: set fields of a node by path, and build components by name."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from axlearn_core.config import Decoder, Node, get_fields
from axlearn_core.config.tree import get
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.registry import registry


def require_fields(cfg: Any, path: str, names: tuple[str, ...], *, feature: str) -> Any:
    """Return the node at a path. Raise `ConfigError` if it or one of its fields is missing."""
    part = get(cfg, path)
    fields = {a.name for a in attrs.fields(type(part))} if isinstance(part, Node) else set()
    missing = [n for n in names if n not in fields]
    if missing:
        raise ConfigError(
            Problem(
                path=f"{path}.{missing[0]}",
                message=f"{feature} cannot set this field: {type(part).__qualname__} does not have it",
                fix=f"remove the feature {feature}, or set the equivalent field of that component",
            )
        )
    return part


def component(name: str, settings: Mapping[str, Any]) -> tuple[Node[Any], dict[str, Any]]:
    """Return the component named `name` with settings, and the decoded settings.

    Fields that are not in the settings may be `REQUIRED`.

    Args:
        name: Registered name.
        settings: Settings as in a file.

    Raises:
        RequestError: If no component has that name, or if it does not have one of the settings.
    """
    node = Decoder(registry()).decode({"type": name, **settings}, Node[Any])
    fields = get_fields(node)
    return node, {k: fields[k] for k in settings}


def component_problems(name: str, settings: Mapping[str, Any]) -> Iterable[Problem]:
    """Return the errors from `component` as problems with the options `component` and `settings`."""
    try:
        component(name, settings)
    except ConfigError as error:
        for problem in error.problems:
            yield attrs.evolve(problem, path="component" if problem.path == "type" else f"settings.{problem.path}")
