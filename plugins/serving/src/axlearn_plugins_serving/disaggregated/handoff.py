"""From the cache of one engine to that of another: the full blocks of a prompt, through a file in shared memory.

Blocks are known by the hash of their tokens, as for prefixes that requests share: whoever gets them has a prompt that is cached
already but for its last tokens. A prompt whose blocks were lost on the way is computed again, so nothing depends on them.
"""

import tempfile
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_plugins_serving.blocks import block_keys, root_key
from axlearn_plugins_serving.engine import ServingEngine


@attrs.frozen(kw_only=True)
class Transfer:
    """Blocks in a file.

    Attributes:
        path: of the file, which the reader removes.
        blocks: how many.
        shapes: (shape, dtype) of the arrays, one after another; the leading axis is that of the blocks.
    """

    path: str
    blocks: int
    shapes: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes)

    def remove(self) -> None:
        """Removes the file, where it is still there."""
        Path(self.path).unlink(missing_ok=True)


def shared_folder() -> "tempfile.TemporaryDirectory[str]":
    """A new folder that only this user reads, in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="axlearn-serve-", dir=memory if memory.is_dir() else None)


def write_prefix(engine: ServingEngine, tokens: tuple[int, ...], adapter: str | None, path: Path) -> Transfer | None:
    """Writes the blocks that an engine has of a prompt; None where it has none."""
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
    """Puts the blocks of a prompt into the cache of an engine, and removes the file.

    Returns:
        How many blocks are new; 0 where there is no room for them or all were there.
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
        cache: Any = engine.runner.cache  # type: ignore[attr-defined]  # the structure of what it reads
        engine.runner.write_blocks(blocks, jax.tree.unflatten(jax.tree.structure(cache), arrays))
        for block, key in zip(blocks, keys[matched:], strict=True):
            pool.set_content(block, key)
        pool.release(blocks)
        return len(blocks)
    finally:
        transfer.remove()


def _keys(engine: ServingEngine, tokens: tuple[int, ...], adapter: str | None) -> list[bytes]:
    size = engine.cache.pool.block_size
    root = root_key(adapter, engine.cache.version)
    return block_keys(root, tokens, size)[: (len(tokens) - 1) // size]  # the last token is always computed


def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name  # bfloat16 and float8 too, where ml_dtypes is imported
