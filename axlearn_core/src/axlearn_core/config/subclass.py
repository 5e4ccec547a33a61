"""The same settings for a subclass of what a config builds: how a wrapper adds to a module without changing its paths."""

from collections.abc import Callable
from typing import Any

from axlearn_core.config.configured import Configured, configured_class
from axlearn_core.config.flat import qualified_name
from axlearn_core.config.node import Node, fields_of
from axlearn_core.errors import ConfigError, Problem


def with_subclass(cfg: Node[Any], subclass_of: Callable[[type], type]) -> Node[Any]:
    """The config that builds `subclass_of(the class that cfg builds)` with the settings of `cfg`.

    A module that needs more attributes or another `__call__`, and whose parameters keep their paths, is built as a subclass of
    its own class; a module around it would stand in the paths of its parameters.

    Args:
        cfg: of a class with a `Config`, or of a class that `configure` wraps.
        subclass_of: from a class to a subclass of it: the same one every time, so that equal modules stay equal.

    Raises:
        ConfigError: `cfg` calls a function, or builds its module in a way of its own, so that its class is not known before.
    """
    owner = type(cfg).owner
    if isinstance(cfg, Configured) and isinstance(owner, type):
        cls: Any = configured_class(subclass_of(owner), type(cfg).__interface__)
    elif isinstance(owner, type) and type(cfg).build is Node.build:
        subclass: Any = subclass_of(owner)
        cls = subclass.Config
    else:
        raise ConfigError(
            Problem(
                path="base",
                message="cannot be extended: its class is not known before it is built",
                got=qualified_name(type(cfg) if owner is None or not isinstance(cfg, Configured) else owner),
                expected="the Config of a class, with the `build` that it inherits, or `configure` of a class",
                fix="give the module a class with a Config of its own, or leave it out of the targets",
            )
        )
    return cls(**fields_of(cfg))
