"""What the features share: nodes that they set by path, and components by name."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from axlearn_core.config import Decoder, Node, fields_of
from axlearn_core.config.tree import get
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.registry import registry


def require_fields(cfg: Any, path: str, names: tuple[str, ...], *, feature: str) -> Any:
    """The node at a path; raises `ConfigError` where there is none, or it lacks one of the fields."""
    part = get(cfg, path)
    fields = {a.name for a in attrs.fields(type(part))} if isinstance(part, Node) else set()
    lacking = [n for n in names if n not in fields]
    if lacking:
        raise ConfigError(
            Problem(
                path=f"{path}.{lacking[0]}",
                message=f"{feature} cannot set it: {type(part).__qualname__} has no such field",
                fix=f"leave the feature {feature} out, or set what that component has in its place",
            )
        )
    return part


def component(name: str, settings: Mapping[str, Any]) -> tuple[Node[Any], dict[str, Any]]:
    """The component that is registered as `name`, with settings as a file has them; also those settings, decoded.

    What the settings leave out may still be `REQUIRED`.

    Raises:
        RequestError: no component has that name, or it has no such setting.
    """
    node = Decoder(registry()).decode({"type": name, **settings}, Node[Any])
    fields = fields_of(node)
    return node, {k: fields[k] for k in settings}


def component_problems(name: str, settings: Mapping[str, Any]) -> Iterable[Problem]:
    """What `component` would raise, as problems of the options `component` and `settings`."""
    try:
        component(name, settings)
    except ConfigError as error:
        for problem in error.problems:
            yield attrs.evolve(problem, path="component" if problem.path == "type" else f"settings.{problem.path}")
