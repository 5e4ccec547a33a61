"""axlearn-core: train and serve large models, with every feature a plugin.

Importing this package imports nothing else; each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from axlearn_core.compose import compose
    from axlearn_core.config import REQUIRED, Node, configure, diff, interface, node, patch, replace_config
    from axlearn_core.nn.layer import Layer
    from axlearn_core.plugins.feature import Feature
    from axlearn_core.plugins.hookspecs import hookimpl
    from axlearn_core.plugins.resolve import resolve
    from axlearn_core.run import open_weights
    from axlearn_core.train import load, train

    serve: Callable[..., Any]

__all__ = [
    "REQUIRED", "Feature", "Layer", "Node", "compose", "configure", "diff", "hookimpl", "interface", "load", "node",
    "open_weights", "patch", "replace_config", "resolve", "serve", "train",
]  # fmt: skip

_CONFIG = ("REQUIRED", "Node", "configure", "diff", "interface", "node", "patch", "replace_config")
_HOMES = dict.fromkeys(_CONFIG, "config") | {
    "Feature": "plugins.feature",
    "Layer": "nn.layer",
    "compose": "compose",
    "hookimpl": "plugins.hookspecs",
    "load": "train",
    "open_weights": "run",
    "resolve": "plugins.resolve",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _function(name)
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    if name == _HOMES[name]:
        return home  # a package that is called by the name of its function
    value = globals()[name] = getattr(home, name)
    return value


def _function(name: str) -> Any:
    """A function that an installed package registers."""
    from axlearn_core.plugins.index import package_of
    from axlearn_core.plugins.registry import registry

    is_function = name in registry().claims["functions"] or package_of("functions", name)
    if name.startswith("_") or not is_function:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return registry().entry("functions", name).load()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
