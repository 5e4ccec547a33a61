"""Checkpoints and weights. `checkpoint.manifest` reads what a checkpoint holds without JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_core.checkpoint.sharded import ShardedCheckpointer
    from axlearn_core.checkpoint.storage import LocalStorage, open_storage
    from axlearn_core.checkpoint.weights import RunWeights, bind_weights, open_weights, split_weights

__all__ = [
    "LocalStorage", "RunWeights", "ShardedCheckpointer", "bind_weights", "open_storage", "open_weights", "split_weights",
]  # fmt: skip

_HOMES = {"ShardedCheckpointer": "sharded", "LocalStorage": "storage", "open_storage": "storage"} | dict.fromkeys(
    ("RunWeights", "bind_weights", "open_weights", "split_weights"), "weights"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
