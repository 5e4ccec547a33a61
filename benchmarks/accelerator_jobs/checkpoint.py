"""Part 6: time to save and restore a training state with the default checkpointer.

Measures how long training waits, and the bytes per second.
"""

import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from accelerator_jobs.context import Context

BYTES, ARRAYS = 10 * 10**9, 40
TOY_BYTES, TOY_ARRAYS = 8 * 10**6, 4
ROOM = 1.3
"""Required free disk space per byte of the checkpoint."""


def measure(context: Context) -> None:
    """Record the rows `save` and `restore`."""
    context.device()
    folder = Path(tempfile.mkdtemp(prefix="axlearn-benchmark-"))
    try:
        num_bytes, arrays = (TOY_BYTES, TOY_ARRAYS) if context.rehearsal else (BYTES, ARRAYS)
        free = shutil.disk_usage(folder).free
        size = min(num_bytes, int(free / ROOM))
        note = (
            None if size == num_bytes else f"{num_bytes / 1e9:g} GB are needed; the disk has {free / 1e9:.1f} GB free"
        )
        from axlearn_core.checkpoint import ShardedCheckpointer

        checkpointer = ShardedCheckpointer.Config(every_steps=1).build(directory=folder / "checkpoints")
        state = _state(size // arrays // 4, arrays)
        saved = context.attempt("save", functools.partial(_save, checkpointer, state, note))
        if saved:
            context.attempt("restore", functools.partial(_restore, checkpointer, state))
        checkpointer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _state(count: int, arrays: int) -> dict[str, Any]:
    import jax

    make = jax.jit(lambda key: jax.random.normal(key, (count,)))
    state = {f"array{i}": make(key) for i, key in enumerate(jax.random.split(jax.random.key(0), arrays))}
    return jax.block_until_ready(state)


def _save(checkpointer: Any, state: dict[str, Any], note: str | None) -> dict[str, Any]:
    size = sum(x.nbytes for x in state.values())
    start = time.perf_counter()
    checkpointer.save(1, state)
    stall = time.perf_counter() - start
    checkpointer.wait()
    total = time.perf_counter() - start
    return {
        "bytes": size,
        "stall_seconds": stall,
        "stall_bytes_per_second": size / stall,
        "total_seconds": total,
        "bytes_per_second": size / total,
        "note": note,
    }


def _restore(checkpointer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Restore the state. Includes comparing the checksums before the restore."""
    import jax
    import jax.numpy as jnp

    size = sum(x.nbytes for x in state.values())
    like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in state.items()}
    start = time.perf_counter()
    restored, _ = checkpointer.restore(1, like)
    jax.block_until_ready(restored)
    seconds = time.perf_counter() - start
    different = [k for k, x in state.items() if not bool(jnp.array_equal(x, restored[k]))]
    figures: dict[str, Any] = {"seconds": seconds, "bytes_per_second": size / seconds, "page_cache": "warm"}
    return figures | ({"error": f"restored other values: {different}"} if different else {})
