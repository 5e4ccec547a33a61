"""The modules whose calls are running, outermost first. Summaries use them to find the path of the module that adds one."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

_running: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("axlearn_running_modules", default=())


def running_modules() -> tuple[Any, ...]:
    """Return the modules whose calls are running, outermost first."""
    return _running.get()


def track_module(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a module, so that `running_modules` contains the module while the method runs."""

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _running.get()
        if modules and modules[-1] is self:  # a class that calls the method of its base class
            return call(self, *args, **kwargs)
        token = _running.set((*modules, self))
        try:
            return call(self, *args, **kwargs)
        finally:
            _running.reset(token)

    return run


def find_path(modules: Sequence[Any]) -> str:
    """Return the path of the last module below the first, or an empty string if it is not below it."""
    if len(modules) < 2:
        return ""
    return next((".".join(map(str, path)) for path, part in nnx.iter_modules(modules[0]) if part is modules[-1]), "")
