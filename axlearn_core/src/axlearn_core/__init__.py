"""axlearn-core: train and serve large models. Every feature is a plugin.

Importing this package does not import its modules. Names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from axlearn_core.compose import compose
    from axlearn_core.config import REQUIRED, Node, configure, diff, interface, node, patch, replace_config
    from axlearn_core.nn.layer import Layer
    from axlearn_core.plugins.code_names import render
    from axlearn_core.plugins.feature import Feature
    from axlearn_core.plugins.hookspecs import hookimpl
    from axlearn_core.plugins.resolve import resolve
    from axlearn_core.run import open_weights
    from axlearn_core.train import load, train

    serve: Callable[..., Any]

__all__ = [
    "REQUIRED", "Feature", "Layer", "Node", "compose", "configure", "diff", "hookimpl", "interface", "load", "node",
    "open_weights", "patch", "render", "replace_config", "resolve", "serve", "train",
]  # fmt: skip

_CONFIG = ("REQUIRED", "Node", "configure", "diff", "interface", "node", "patch", "replace_config")
_MODULE_NAMES = dict.fromkeys(_CONFIG, "config") | {
    "Feature": "plugins.feature",
    "Layer": "nn.layer",
    "compose": "compose",
    "hookimpl": "plugins.hookspecs",
    "load": "train",
    "open_weights": "run",
    "render": "plugins.code_names",
    "resolve": "plugins.resolve",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_NAMES:
        return _load_function(name)
    module = importlib.import_module(f"{__name__}.{_MODULE_NAMES[name]}")
    if name == _MODULE_NAMES[name]:
        return module  # the module has the same name as its function and is callable
    value = globals()[name] = getattr(module, name)
    return value


def _load_function(name: str) -> Any:
    """Load a function that an installed plugin registers."""
    from axlearn_core.plugins.index import find_package
    from axlearn_core.plugins.registry import registry

    is_function = name in registry().claims["functions"] or find_package("functions", name)
    if name.startswith("_") or not is_function:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return registry().entry("functions", name).load()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
