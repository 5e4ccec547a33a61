"""Functions, classes and components under their earlier names, for one release: a warning says the new name."""

import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

COMPONENTS = {"orbax": "sharded"}
"""Earlier name -> name, of components of the core."""


def renamed_attributes(
    module: str, otherwise: Callable[[str], Any] | None = None, /, **names: str
) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose public names changed: earlier name -> name. `otherwise` gives all other names.

        if not TYPE_CHECKING:
            __getattr__ = renamed_attributes(__name__, say="log_message")

    An earlier name warns with `DeprecationWarning` and gives what has the new name.
    """

    def __getattr__(name: str) -> Any:
        if name not in names and otherwise is not None:
            return otherwise(name)
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return __getattr__


def current_component(name: str, registered: Collection[str]) -> str:
    """The name that a component has today; warns with `DeprecationWarning` where `name` is an earlier one."""
    if name in registered or name not in COMPONENTS:
        return name
    _warn(f"the component {name!r}", repr(COMPONENTS[name]))
    return COMPONENTS[name]


def rename_components(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A resolved config, as plain data, with the names that components of the core have today."""
    values = {key: _rename_in(value) for key, value in config.items()}
    kind = values.get("type")
    return {**values, "type": COMPONENTS[kind]} if isinstance(kind, str) and kind in COMPONENTS else values


def _rename_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return rename_components(value)
    return [_rename_in(item) for item in value] if isinstance(value, list | tuple) else value


def _warn(old: str, new: str) -> None:
    message = f"{old} is now {new}; the old name goes with version 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=3)  # where the caller of this module is
