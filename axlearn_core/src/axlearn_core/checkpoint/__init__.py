"""Checkpoints over a storage. `checkpoint.manifest` reads what a checkpoint holds without JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_core.checkpoint.sharded import ShardedCheckpointer
    from axlearn_core.checkpoint.storage import LocalStorage, open_storage

__all__ = ["LocalStorage", "ShardedCheckpointer", "open_storage"]

_HOMES = {"ShardedCheckpointer": "sharded", "LocalStorage": "storage", "open_storage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
