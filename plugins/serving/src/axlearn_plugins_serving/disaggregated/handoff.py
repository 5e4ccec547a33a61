"""Transfer a prompt's full blocks between engines through shared memory.

Blocks are identified by a hash of their tokens, as in prefix sharing between requests. The receiving engine therefore finds the
prompt in its cache, except for the last tokens. If blocks are lost, the engine computes the prompt again.
"""

import tempfile
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.blocks import block_keys
from axlearn_plugins_serving.engine import ServingEngine


@attrs.frozen(kw_only=True)
class Transfer:
    """Cache blocks stored in a file.

    Attributes:
        path: Path of the file, which the reader removes.
        blocks: Number of blocks.
        shapes: (shape, dtype) of each array in the file. The leading axis runs over the blocks.
    """

    path: str
    blocks: int
    shapes: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes)

    def remove(self) -> None:
        """Remove the file if it still exists."""
        Path(self.path).unlink(missing_ok=True)


def check_transfers(engine: ServingEngine) -> None:
    """Raise `RequestError` if a prompt's blocks do not contain everything that another engine needs."""
    if engine.cache.snapshots is not None:
        raise RequestError(
            "prefill and decode cannot be separated for a model with recurrent layers\n"
            "    got: a model with recurrent states, which are not part of the blocks that are transferred\n"
            "    fix: serve it with replicas, or in one process"
        )


def shared_folder() -> "tempfile.TemporaryDirectory[str]":
    """Create a folder that only this user can read.

    It is in memory if the machine has /dev/shm.
    """
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="axlearn-serve-", dir=memory if memory.is_dir() else None)


def write_prefix(engine: ServingEngine, tokens: tuple[int, ...], adapter: str | None, path: Path) -> Transfer | None:
    """Write the cached blocks of a prompt to a file.

    Returns None if no block is cached.
    """
    blocks = engine.cache.pool.match(_keys(engine, tokens, adapter))
    if not blocks:
        return None
    arrays = [np.ascontiguousarray(x) for x in jax.tree.leaves(engine.runner.read_blocks(blocks))]
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.view(np.uint8).reshape(-1).data)
    shapes = tuple((tuple(x.shape), _dtype_name(x.dtype)) for x in arrays)
    return Transfer(path=str(path), blocks=len(blocks), shapes=shapes)


def read_prefix(engine: ServingEngine, tokens: tuple[int, ...], adapter: str | None, transfer: Transfer) -> int:
    """Write the blocks of a prompt into an engine's cache and remove the file.

    Returns:
        Number of new blocks; 0 if there is no room or all blocks were already cached.
    """
    try:
        keys = _keys(engine, tokens, adapter)[: transfer.blocks]
        pool, matched = engine.cache.pool, len(engine.cache.pool.match(keys))
        blocks = pool.allocate(len(keys) - matched) if len(keys) > matched else None
        if blocks is None:
            return 0
        data, begin, arrays = np.fromfile(transfer.path, np.uint8), 0, []
        for shape, dtype in transfer.shapes:
            end = begin + int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays.append(data[begin:end].view(np.dtype(dtype)).reshape(shape)[matched:])
            begin = end
        engine.runner.write_blocks(blocks, tuple(arrays))
        for block, key in zip(blocks, keys[matched:], strict=True):
            pool.set_content(block, key)
        pool.release(blocks)
        return len(blocks)
    finally:
        transfer.remove()


def _keys(engine: ServingEngine, tokens: tuple[int, ...], adapter: str | None) -> list[bytes]:
    size = engine.cache.pool.block_size
    root = engine.cache.root_key(adapter, tokens)
    return block_keys(root, tokens, size)[: (len(tokens) - 1) // size]  # the last token is always computed


def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name  # includes bfloat16 and float8 once ml_dtypes is imported
