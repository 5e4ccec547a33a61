"""Prove a config before it runs, and replay a step of a run.

    from axlearn_plugins_verify import prove, replay

Importing this package does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_plugins_verify.prove.proof import prove
    from axlearn_plugins_verify.replay.step_replay import replay

__all__ = ["prove", "replay"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")  # a callable package, named after its function
