"""Checkpoints in local directories and remote storage. `checkpoint.manifest` inspects checkpoints without importing JAX."""

from typing import TYPE_CHECKING

from axlearn_core.compat import lazy_names

if TYPE_CHECKING:
    from axlearn_core.checkpoint.sharded import ShardedCheckpointer
    from axlearn_core.checkpoint.storage import LocalStorage, open_storage

__all__ = ["LocalStorage", "ShardedCheckpointer", "open_storage"]

_MODULES = {"ShardedCheckpointer": "sharded", "LocalStorage": "storage", "open_storage": "storage"}


__getattr__ = lazy_names(__name__, _MODULES)
